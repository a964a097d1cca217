"""Structs in Thrift's compact protocol, as far as footers and headers of pages of parquet files need it.

Format: https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
"""

from __future__ import annotations

from typing import TypeAlias

I32, I64, STRUCT, LIST = 5, 6, 12, 9
"""Kinds of fields that are kept. A reader passes over a field of another kind than it expects, so a kind is looked up
with a field's number."""

Fields: TypeAlias = "dict[tuple[int, int], int | Fields | list[Fields]]"
"""Values by number and kind: integers, structs, and lists of structs. What is none of these is left out."""

_TRUE, _FALSE, _BYTE, _I16, _DOUBLE, _BINARY, _SET = 1, 2, 3, 4, 7, 8, 10
_MAX_DEPTH = 8
_MAX_STRUCTS = 1 << 21
_SEVEN_BITS = 127
_LONG_FORM = 15
"""Length of a list that stands in bytes of its own."""


class ThriftError(ValueError):
    """Bytes that are no struct."""


class ShortError(ThriftError):
    """They end before the struct does."""


def read_struct(data: bytes) -> tuple[Fields, int]:
    """Return the fields of a struct with which ``data`` begins, and how many bytes it takes.

    Raises:
        ShortError: the bytes end within it.
        ThriftError: it is none, gives a field twice, or holds too many structs.
    """
    reader = _Reader(data)
    return reader.struct(0), reader.place


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._structs = 0
        self.place = 0

    def struct(self, depth: int) -> Fields:
        self._structs += 1
        if depth > _MAX_DEPTH or self._structs > _MAX_STRUCTS:
            msg = "structs nest too deeply" if depth > _MAX_DEPTH else f"more than {_MAX_STRUCTS:,} structs"
            raise ThriftError(msg)
        fields: Fields = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._integer()
            kind = head & 15
            value = self._value(kind, depth)
            if value is None:
                continue
            if (number, kind) in fields:
                msg = f"field {number} twice"
                raise ThriftError(msg)
            fields[number, kind] = value
        return fields

    def _value(self, kind: int, depth: int) -> int | Fields | list[Fields] | None:
        if kind in (I32, I64, _I16):
            return self._integer()
        if kind == _BINARY:
            self._skip(self._unsigned())
        elif kind == STRUCT:
            return self.struct(depth + 1)
        elif kind in (LIST, _SET):
            return self._list(depth)
        elif kind == _BYTE:
            self._skip(1)
        elif kind == _DOUBLE:
            self._skip(8)
        elif kind not in (_TRUE, _FALSE):
            msg = f"a field of kind {kind}"
            raise ThriftError(msg)
        return None

    def _list(self, depth: int) -> list[Fields]:
        head = self._byte()
        count = head >> 4 if head >> 4 != _LONG_FORM else self._unsigned()
        kind = head & 15
        if kind == STRUCT:
            return [self.struct(depth + 1) for _ in range(count)]
        for _ in range(count):  # each takes a byte at least, so that a count that lies ends soon
            if kind in (_TRUE, _FALSE):
                self._skip(1)
            else:
                self._value(kind, depth + 1)
        return []

    def _byte(self) -> int:
        place = self.place
        if place >= len(self._data):
            self._end()
        self.place = place + 1
        return self._data[place]

    def _skip(self, count: int) -> None:
        if count > len(self._data) - self.place:
            self._end()
        self.place += count

    def _end(self) -> None:
        msg = f"they end after {len(self._data)} bytes"
        raise ShortError(msg)

    def _unsigned(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & _SEVEN_BITS) << shift
            if byte <= _SEVEN_BITS:
                return value
        msg = "a number of more than 64 bits"
        raise ThriftError(msg)

    def _integer(self) -> int:
        value = self._unsigned()
        return value >> 1 ^ -(value & 1)
