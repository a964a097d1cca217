"""How many bytes columns of a row group take once they are decoded, found before they are decoded.

A footer may say anything, so sizes are those of the headers of the pages themselves, which decoders obey too. A few
bytes can stand for much in three ways: a page that is compressed, an entry of a dictionary that many values share, and
values that share prefixes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import BinaryIO

import attrs

from mimo_dataset_parquet._cells import TableError
from mimo_dataset_parquet._chunks import Chunk
from mimo_dataset_parquet._thrift import I32, STRUCT, Fields, ShortError, ThriftError, read_struct

_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
"""Kinds of pages that hold values; parquet.thrift's ``PageType``."""
_ABOUT: Mapping[int, tuple[int, int]] = {_DATA: (5, 2), _DICTIONARY: (7, 2), _DATA_V2: (8, 4)}
"""Of each the field of its own header, and in that the field of the encoding."""
_SHARED_BEGINNINGS = 7
"""``Encoding.DELTA_BYTE_ARRAY``."""
_HEADERS = (1 << 12, 1 << 20)
"""Bytes of a page's header that are read, the second number where the first is too few."""


@attrs.frozen(kw_only=True)
class ChunkSize:
    """What the pages of a chunk say.

    Args:
        bytes: of all pages, no longer compressed; of values that share prefixes, written in full.
        values: how many there are, nulls included.
        largest: bytes of the dictionary, so that no value of it is larger; 0 without one.
    """

    bytes: int
    values: int
    largest: int


def measure_chunk(file: BinaryIO, chunk: Chunk) -> ChunkSize:
    """Return the size of a chunk, of which the headers of pages are read.

    Raises:
        TableError: one is damaged.
        OSError: the file can't be read.
    """
    bytes_ = values = largest = 0
    for kind, size, count, encoding in _pages(file, chunk):
        bytes_ += size * max(count, 1) if encoding == _SHARED_BEGINNINGS else size
        if kind == _DICTIONARY:
            largest += size
        else:
            values += count
    return ChunkSize(bytes=bytes_, values=values, largest=largest)


def _pages(file: BinaryIO, chunk: Chunk) -> Iterator[tuple[int, int, int, int]]:
    """Yield of each page its kind, bytes when no longer compressed, number of values and encoding."""
    place = chunk.begin
    while place < chunk.end:
        fields, length = _header(file, place, chunk.end)
        kind, decoded, stored = (_integer(fields, number) for number in (1, 2, 3))
        if min(decoded, stored) < 0:
            msg = f"a page without its sizes at byte {place}"
            raise TableError(msg)
        place += length + stored
        if place > chunk.end:
            msg = f"a page that ends at byte {place}, behind its column's end {chunk.end}"
            raise TableError(msg)
        own, encoding = _ABOUT.get(kind, (0, 0))
        about = fields.get((own, STRUCT))
        about = about if isinstance(about, dict) else {}
        yield kind, decoded, max(_integer(about, 1), 0), _integer(about, encoding)


def _header(file: BinaryIO, place: int, end: int) -> tuple[Fields, int]:
    for length in _HEADERS:
        file.seek(place)
        try:
            return read_struct(file.read(min(length, end - place)))
        except ThriftError as error:
            reason = str(error)
            if not isinstance(error, ShortError):
                break
    msg = f"a page whose header at byte {place} is damaged ({reason})"
    raise TableError(msg)


def _integer(fields: Fields, number: int) -> int:
    value = fields.get((number, I32))
    return value if isinstance(value, int) else -1
