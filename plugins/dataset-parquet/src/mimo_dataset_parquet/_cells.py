"""A value of a table as plain Python: bounded in size, and checked before it is looked at, as a file may lie."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyarrow import types as kinds

MAX_ROW = 1 << 28
"""Bytes of one row's values in the columns that are read."""
_CELL = 64
"""Bytes that a value takes at least in Python."""

_LETTERS = (kinds.is_string, kinds.is_binary, kinds.is_large_string, kinds.is_large_binary)
_NUMBERS = (kinds.is_boolean, kinds.is_integer, kinds.is_floating)


class TableError(ValueError):
    """What is wrong with a file of a table, or with a value of it; its reader knows the place."""


class Row:
    """Reads values of one row, until they are more than `MAX_ROW` bytes."""

    def __init__(self) -> None:
        self._left = MAX_ROW

    def value(self, array: pa.Array, index: int) -> Any:
        """Return a value of a column, with lists, and dicts for structs, in which nulls are left out.

        Raises:
            TableError: it is damaged, too large, or of a kind that samples have none of.
        """
        try:
            return self._value(array, index)
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise TableError(str(error)) from error

    def _value(self, array: pa.Array, index: int) -> Any:
        self._spend(_CELL)
        one, kind = array.slice(index, 1), array.type
        if len(one) != 1:
            msg = f"value {index} of {len(array)}"
            raise TableError(msg)
        if one.null_count:
            return None
        if kinds.is_dictionary(kind):
            return self._value(one.dictionary, one.indices[0].as_py())
        if kind.num_fields:
            return self._nested(one)
        if any(accepts(kind) for accepts in _LETTERS):
            one.validate(full=True)  # its offsets, and that its letters are UTF-8; alone it is quick
            self._spend(one.nbytes)
        elif not any(accepts(kind) for accepts in _NUMBERS):
            msg = f"a value of type {kind}, which is not read"
            raise TableError(msg)
        return one[0].as_py()

    def _nested(self, one: pa.Array) -> Any:
        kind = one.type
        if kinds.is_struct(kind):
            values = {kind.field(number).name: self._value(one.field(number), 0) for number in range(kind.num_fields)}
            return {name: value for name, value in values.items() if value is not None}
        if kinds.is_list(kind) or kinds.is_large_list(kind):
            begin, end = one.offsets.to_pylist()
            return self._values(one.values, begin, end)
        if kinds.is_fixed_size_list(kind):
            return self._values(one.flatten(), 0, kind.list_size)
        msg = f"a value of type {kind}, which is not read"
        raise TableError(msg)

    def _values(self, array: pa.Array, begin: int, end: int) -> list[Any]:
        if not 0 <= begin <= end <= len(array):
            msg = f"a list of values {begin} to {end} of {len(array)}"
            raise TableError(msg)
        self._spend((end - begin) * _CELL)
        return [self._value(array, index) for index in range(begin, end)]

    def _spend(self, bytes_: int) -> None:
        self._left -= bytes_
        if self._left < 0:
            msg = f"a row of more than {MAX_ROW:,} bytes"
            raise TableError(msg)
