"""Parquet files: a footer says where row groups are, and one of them is decoded at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import attrs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mimo_dataset_parquet._cells import TableError
from mimo_dataset_parquet._chunks import Chunk, read_chunks
from mimo_dataset_parquet._pages import measure_chunk
from mimo_dataset_parquet._table import Group, checked_rows, checked_schema, read_exactly, size_of

MAX_FOOTER = 1 << 25
"""Bytes."""
MAX_GROUP = 1 << 30
"""Bytes of the columns of a row group that are read, decoded."""
_VALUE = 16
"""Bytes of a value beside its letters: its levels, offsets, or the number that it is."""
_LETTERS = "BYTE_ARRAY"
_NUMBERS = ("BOOLEAN", "INT32", "INT64", "FLOAT", "DOUBLE")
_MAGIC = b"PAR1"
_ENCRYPTED = b"PARE"
_VERSION = re.compile(r"version (\d{1,4})\.(\d{1,4})\.(\d{1,4})")
_FIXED = (1, 2, 9)
"""Version of parquet-mr from which on footers are right (PARQUET-816)."""
_END = 8
"""Bytes of a footer's length and the magic after it."""


@attrs.frozen(kw_only=True)
class Leaf:
    """A column of plain values, of which a column of lists or structs has several.

    Args:
        path: the names on the way to it, with dots between.
        kind: how values are stored, parquet.thrift's ``Type``.
        in_lists: whether a row may have several values, or none.
    """

    path: str
    kind: str
    in_lists: bool


@attrs.frozen(kw_only=True, eq=False)
class ParquetTable:
    """One file. It is opened for each group that is read, so that no handle is shared by threads or processes."""

    path: Path
    rows: NDArray[np.int64]
    schema: pa.Schema
    leaves: tuple[Leaf, ...]

    def read(self, group: int, columns: Sequence[str]) -> Group:
        """Return some columns of a row group; see `Table`."""
        try:
            with _arrow_errors():
                shared = self._shared(group, columns)
                # Neither threads of Arrow, which a forked process lacks, nor a map, which a file cut short turns into
                # a signal.
                with pq.ParquetFile(self.path, read_dictionary=shared, pre_buffer=False) as file:
                    found = file.read_row_group(group, columns=list(columns), use_threads=False)
        except TableError as error:
            msg = f"row group {group}: {error}"
            raise TableError(msg) from error
        if found.num_rows != self.rows[group]:
            msg = f"row group {group}: {found.num_rows:,} rows of {self.rows[group]:,}"
            raise TableError(msg)
        pieces = {name: found.column(name).chunks for name in columns}
        return Group(columns=pieces, rows=found.num_rows, bytes=found.get_total_buffer_size())

    @cached_property
    def _chunks(self) -> list[list[Chunk]]:
        found = read_chunks(_footer(self.path), len(self.leaves), self.path.stat().st_size)
        if len(found) != len(self.rows):
            msg = f"{len(found)} row groups, where there were {len(self.rows)} as it was opened"
            raise TableError(msg)
        return found

    def _shared(self, group: int, columns: Sequence[str]) -> list[str]:
        """Return the leaves of which each entry is to be kept once, since they might take too much otherwise.

        Raises:
            TableError: what is read would be larger than `MAX_GROUP` even so, or has not as many rows as was said.
        """
        shared, left = [], MAX_GROUP
        with self.path.open("rb", buffering=0) as file:
            for leaf, chunk in zip(self.leaves, self._chunks[group], strict=True):
                if not any(f"{leaf.path}.".startswith(f"{name}.") for name in columns):  # as pyarrow chooses
                    continue
                if leaf.kind != _LETTERS and leaf.kind not in _NUMBERS:
                    msg = f"column {leaf.path!r} of type {leaf.kind}, which is not read"
                    raise TableError(msg)
                size = measure_chunk(file, chunk)
                if size.values < self.rows[group] or (size.values > self.rows[group] and not leaf.in_lists):
                    msg = f"{self.rows[group]:,} rows, for which column {leaf.path!r} has {size.values:,} values"
                    raise TableError(msg)
                left -= size.bytes + size.values * _VALUE
                if leaf.kind == _LETTERS and size.largest * size.values > left:
                    shared.append(leaf.path)
                elif leaf.kind == _LETTERS:
                    left -= size.largest * size.values
                if left < 0:
                    msg = f"more than {MAX_GROUP:,} bytes in the columns that are read: write groups of fewer rows"
                    raise TableError(msg)
        return shared


def open_parquet(path: Path) -> ParquetTable:
    """Return a file, of which the footer was read and no more.

    Raises:
        TableError: it is no parquet file, or a damaged one.
        OSError: it can't be read.
    """
    _footer(path)
    with _arrow_errors(), pq.ParquetFile(path, pre_buffer=False) as file:
        metadata, schema = file.metadata, file.schema
        _check_writer(metadata.created_by)
        rows = checked_rows([metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)])
        leaves = [schema.column(number) for number in range(metadata.num_columns)]
        return ParquetTable(
            path=path,
            rows=rows,
            schema=checked_schema(file.schema_arrow),
            leaves=tuple(
                Leaf(path=leaf.path, kind=leaf.physical_type, in_lists=leaf.max_repetition_level > 0) for leaf in leaves
            ),
        )


def _check_writer(name: str) -> None:
    """Refuse files of a writer, of 2013, of which pyarrow reads more bytes than the footer says a column has."""
    if "parquet-mr" in name.lower():
        version = _VERSION.search(name)
        if version is None or tuple(map(int, version.groups())) < _FIXED:
            msg = f"a file of {name!r}, whose footers are wrong: write it anew"
            raise TableError(msg)


@contextmanager
def _arrow_errors() -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise TableError(str(error)) from error


def _footer(path: Path) -> bytes:
    """Return the bytes of a file's footer, which are no more than `MAX_FOOTER`."""
    size = size_of(path)
    with path.open("rb", buffering=0) as file:
        file.seek(max(size - _END, 0))
        end = read_exactly(file, min(_END, size))
        length = int.from_bytes(end[:4], "little")
        if end[4:] == _ENCRYPTED:
            msg = "an encrypted file"
            raise TableError(msg)
        if end[4:] != _MAGIC or length > size - _END - len(_MAGIC):
            msg = "no parquet file, or one that was cut short"
            raise TableError(msg)
        if length > MAX_FOOTER:
            msg = f"a footer of {length:,} bytes, more than {MAX_FOOTER:,}"
            raise TableError(msg)
        file.seek(size - _END - length)
        return read_exactly(file, length)
