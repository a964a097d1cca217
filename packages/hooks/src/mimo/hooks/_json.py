"""Reads JSON strictly: nothing is coerced or passed over, and an error names the file and the keys on the way."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from mimo.hooks._errors import UserError

_MAX_SHOWN = 80
"""Characters of a wrong value that an error shows."""
_SIZES = range(1 << 62)


def parse_json(text: str | bytes, *, constants: bool = False) -> Any:
    """Return the value of a JSON text.

    Args:
        text: as text, or as bytes in UTF-8.
        constants: whether NaN and Infinity are allowed, which JSON does not have but many writers write.

    Raises:
        ValueError: it is no JSON, gives a key twice, or nests too deeply; a `json.JSONDecodeError` where it has a line
            and a column.
    """
    try:
        text = text if isinstance(text, str) else text.decode("utf-8")
        return json.loads(text, object_pairs_hook=_unique, parse_constant=float if constants else _refuse_constant)
    except RecursionError:
        msg = "too many levels of nesting"
        raise ValueError(msg) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        keys = [key for key, _ in pairs]
        msg = f"{next(key for key in keys if keys.count(key) > 1)!r} is given twice"
        raise ValueError(msg)
    return table


def _refuse_constant(token: str) -> Any:
    msg = f"{token} is not JSON"
    raise ValueError(msg)


@attrs.frozen(kw_only=True)
class JsonSource:
    """Where a JSON text comes from, and the error that is raised for it.

    Args:
        where: name of the file or setting.
        error: class of the error.
        fix: the next step, for every error.
        separator: what stands between ``where`` and the first key, and between keys.
    """

    where: str
    error: type[UserError]
    fix: str = ""
    separator: str = "."

    def parse(self, text: str | bytes) -> JsonNode:
        """Return the root of a JSON text.

        Raises:
            UserError: of class ``error``; it is no JSON.
        """
        try:
            return JsonNode(parse_json(text), self)
        except json.JSONDecodeError as error:
            got = f"{error.msg} at line {error.lineno}, column {error.colno}"
            raise self.error(self.where, expected="JSON", got=got, fix=self.fix) from error
        except ValueError as error:
            raise self.error(self.where, expected="JSON", got=str(error), fix=self.fix) from error


@attrs.frozen
class JsonNode:
    """A value of a JSON text that knows the keys on the way to it. What it can't be read as raises `UserError`."""

    value: Any
    parent: JsonNode | JsonSource
    key: str | int = ""

    @property
    def source(self) -> JsonSource:
        """Where the text comes from."""
        return self.parent if isinstance(self.parent, JsonSource) else self.parent.source

    @property
    def where(self) -> str:
        """File and keys: ``plan.actors[0].ranks``."""
        if isinstance(self.parent, JsonSource):
            return self.parent.where
        return self.parent.where + (f"[{self.key}]" if isinstance(self.key, int) else self.source.separator + self.key)

    def fail(self, expected: str, fix: str = "") -> UserError:
        """Return the error that this value is not what was expected; without a next step, with that of the source."""
        shown = json.dumps(self.value, default=_kind_of)
        got = shown if len(shown) <= _MAX_SHOWN else f"{shown[: _MAX_SHOWN - 1]}…"
        return self.source.error(self.where, expected=expected, got=got, fix=fix or self.source.fix)

    def __getitem__(self, key: str) -> JsonNode:
        """Return the value of an object's key."""
        if not isinstance(self.value, dict) or key not in self.value:
            raise self.fail(f"an object with {key!r}")
        return JsonNode(self.value[key], self, key)

    def items(self) -> Iterator[tuple[str, JsonNode]]:
        """Return the keys and values of an object."""
        if not isinstance(self.value, dict):
            raise self.fail("an object")
        return ((key, JsonNode(part, self, key)) for key, part in self.value.items())

    def fields(self, required: Iterable[str], optional: Iterable[str] = ()) -> Mapping[str, JsonNode]:
        """Return the values of an object by key: all required ones, and none beside these and the optional ones."""
        found = dict(self.items())
        names = [*required, *optional]
        for key in required:
            if key not in found:
                raise self.source.error(
                    f"{self.where}{self.source.separator}{key}", expected="a value", got="none", fix=self.source.fix
                )
        for key in found:
            if key not in names:
                raise self.source.error(
                    self.where, expected=f"only the keys {', '.join(names)}", got=repr(key), fix=self.source.fix
                )
        return found

    def list(self) -> list[JsonNode]:
        """Return the values of an array."""
        if not isinstance(self.value, list):
            raise self.fail("an array")
        return [JsonNode(part, self, index) for index, part in enumerate(self.value)]

    def integer(self) -> int:
        """Return an integer."""
        if type(self.value) is not int:
            raise self.fail("an integer")
        return self.value

    def integers(self) -> tuple[int, ...]:
        """Return an array of integers."""
        return tuple(part.integer() for part in self.list())

    def size(self) -> int:
        """Return an integer from 0 that fits into 62 bits, such as a number of bytes."""
        if not _is_size(self.value):
            raise self.fail("a whole number")
        return int(self.value)

    def sizes(self) -> tuple[int, ...]:
        """Return an array of them."""
        if isinstance(self.value, list) and all(map(_is_size, self.value)):  # many, so the good case is quick
            return tuple(self.value)
        return tuple(part.size() for part in self.list())

    def text(self) -> str:
        """Return a string."""
        if not isinstance(self.value, str):
            raise self.fail("a string")
        return self.value


def _kind_of(value: Any) -> str:
    """Return what stands in messages for a value that JSON doesn't have, such as the bytes of an item."""
    return f"<{type(value).__name__}>"


def _is_size(value: Any) -> bool:
    return type(value) is int and value in _SIZES
