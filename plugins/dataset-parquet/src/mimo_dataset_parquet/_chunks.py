"""Where a footer says that the columns of row groups lie.

It is read here, since pyarrow ends the process as its `ColumnChunkMetaData` is made of a damaged or encrypted footer.
Format: https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from mimo_dataset_parquet._cells import TableError
from mimo_dataset_parquet._thrift import I32, I64, LIST, STRUCT, Fields, ThriftError, read_struct

_CODECS = ("UNCOMPRESSED", "SNAPPY", "GZIP", "LZO", "BROTLI", "LZ4", "ZSTD", "LZ4_RAW")
_KNOWN = frozenset(_CODECS) - {"LZO"}


@attrs.frozen
class Chunk:
    """The bytes of one column of one row group: its first and the one after its last."""

    begin: int
    end: int


def read_chunks(footer: bytes, columns: int, size: int) -> list[list[Chunk]]:
    """Return for each row group the chunk of each leaf column.

    Args:
        footer: in Thrift.
        columns: how many leaf columns the schema has.
        size: of the file in bytes.

    Raises:
        TableError: the footer is damaged, or columns are encrypted, or compressed in a way that isn't known.
    """
    try:
        fields, _ = read_struct(footer)
    except ThriftError as error:
        msg = f"a damaged footer ({error})"
        raise TableError(msg) from None
    return [list(_chunks_of(group, columns, size)) for group in _structs(fields, 4)]


def _chunks_of(group: Fields, columns: int, size: int) -> Iterator[Chunk]:
    found = _structs(group, 1)
    if len(found) != columns:
        msg = f"a row group of {len(found)} columns, where the schema has {columns}"
        raise TableError(msg)
    for number, column in enumerate(found):
        about = column.get((3, STRUCT))
        if not isinstance(about, dict) or (8, STRUCT) in column:
            msg = f"column {number} of a row group encrypted, or without a description"
            raise TableError(msg)
        codec = _integer(about, 4, I32)
        if not 0 <= codec < len(_CODECS) or _CODECS[codec] not in _KNOWN:
            msg = f"column {number} of a row group compressed by codec {codec}, which is not known"
            raise TableError(msg)
        begin, dictionary = _integer(about, 9, I64), _integer(about, 11, I64)
        if 0 < dictionary < begin:
            begin = dictionary
        end = begin + _integer(about, 7, I64)
        if not 0 < begin <= end <= size:
            msg = f"column {number} of a row group from byte {begin} to {end} of a file of {size}"
            raise TableError(msg)
        yield Chunk(begin, end)


def _structs(fields: Fields, number: int) -> list[Fields]:
    value = fields.get((number, LIST))
    return value if isinstance(value, list) else []


def _integer(fields: Fields, number: int, kind: int) -> int:
    value = fields.get((number, kind))
    return value if isinstance(value, int) else -1
