"""What both formats are read as: a file of groups of rows, of which one group is decoded at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol, TypeAlias

import attrs
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mimo_dataset_parquet._cells import TableError

Columns: TypeAlias = "Mapping[str, Sequence[pa.Array]]"
"""Values by column, each in one or several pieces."""

MAX_ROWS = 1 << 40
"""Of a group."""
_POINTER = b"version https://git-lfs"


@attrs.frozen(kw_only=True)
class Group:
    """Rows of a file that are read together.

    Args:
        columns: that were asked for.
        rows: how many there are.
        bytes: of memory that they take, pages of a mapped file not counted.
    """

    columns: Columns
    rows: int
    bytes: int

    def value_at(self, column: str, row: int) -> tuple[pa.Array, int]:
        """Return the piece of a column that holds a row, and where in it.

        Raises:
            TableError: there are fewer rows than the file says.
        """
        place = row
        for piece in self.columns[column]:
            if place < len(piece):
                return piece, place
            place -= len(piece)
        msg = f"{row - place} values in column {column!r} of {self.rows} rows"
        raise TableError(msg)


class Table(Protocol):
    """One file."""

    @property
    def path(self) -> Path:
        """Of the file."""

    @property
    def rows(self) -> NDArray[np.int64]:
        """Number of rows of each group."""

    @property
    def schema(self) -> pa.Schema:
        """Its columns."""

    def read(self, group: int, columns: Sequence[str]) -> Group:
        """Return some columns of a group.

        Raises:
            TableError: it is damaged or too large.
            OSError: it can't be read.
        """


def size_of(path: Path) -> int:
    """Return the bytes of a file.

    Raises:
        TableError: it is none, as a named pipe, which would be waited for, or what git-lfs keeps in its place.
        OSError: it can't be read.
    """
    if not path.is_file():
        msg = "no file"
        raise TableError(msg)
    with path.open("rb", buffering=0) as file:
        head = file.read(len(_POINTER))
    if head == _POINTER:
        msg = "a pointer of git-lfs in its place: run `git lfs pull` in the repository"
        raise TableError(msg)
    return path.stat().st_size


def checked_schema(schema: pa.Schema) -> pa.Schema:
    """Return a schema of which all names can be read.

    Raises:
        TableError: one is no text.
    """
    open_ends = [schema.field(number) for number in range(len(schema))]
    try:
        while open_ends:
            field = open_ends.pop()
            if field.name is not None and not isinstance(field.type, pa.BaseExtensionType):
                open_ends += [field.type.field(number) for number in range(field.type.num_fields)]
    except UnicodeDecodeError as error:
        msg = f"a column whose name is no text ({error})"
        raise TableError(msg) from None
    return schema


def checked_rows(rows: Sequence[int]) -> NDArray[np.int64]:
    """Return numbers of rows.

    Raises:
        TableError: one is negative or absurd.
    """
    if wrong := [count for count in rows if not 0 <= count <= MAX_ROWS]:
        msg = f"a group of {wrong[0]:,} rows"
        raise TableError(msg)
    return np.asarray(rows, dtype=np.int64)


def read_exactly(file: BinaryIO, count: int) -> bytes:
    """Return so many bytes.

    Raises:
        TableError: the file ends before.
    """
    data = file.read(count)
    if len(data) != count:
        msg = "a file that ends early"
        raise TableError(msg)
    return data
