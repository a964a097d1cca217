"""Reads JSON of plans strictly: nothing is coerced or ignored, and an error gives the place and the cause."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from mimo.hooks import PlanError

_LONGEST = 60
"""Characters of a wrong value that an error shows."""


@attrs.frozen
class JsonValue:
    """A JSON value and its path, such as ``plan.actors[0].ranks``."""

    value: Any
    where: str

    @classmethod
    def of(cls, text: str, where: str) -> JsonValue:
        """Parse a JSON text."""
        try:
            return cls(json.loads(text), where)
        except json.JSONDecodeError as error:
            got = f"{error.msg} at line {error.lineno}, column {error.colno}"
            raise PlanError(where, expected="JSON", got=got) from error
        except RecursionError as error:
            raise PlanError(where, expected="JSON", got="brackets within brackets, too deep to read") from error

    def fields(self, cls: type[attrs.AttrsInstance]) -> Mapping[str, JsonValue]:
        """Return the values of an object by key: all that ``cls`` requires, and no others."""
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        fields = attrs.fields_dict(cls)
        for key, field in fields.items():
            if key not in self.value and field.default is attrs.NOTHING:
                raise PlanError(f"{self.where}.{key}", expected="a value", got="none")
        for key in self.value:
            if key not in fields:
                raise PlanError(self.where, expected=f"only the keys {', '.join(fields)}", got=repr(key))
        return {key: JsonValue(value, f"{self.where}.{key}") for key, value in self.value.items()}

    def items(self) -> Sequence[JsonValue]:
        """Return the values of an array."""
        if not isinstance(self.value, list):
            raise self.wrong("an array")
        return [JsonValue(value, f"{self.where}[{index}]") for index, value in enumerate(self.value)]

    def integer(self) -> int:
        """Return an integer."""
        if type(self.value) is not int:
            raise self.wrong("an integer")
        return self.value

    def integers(self) -> tuple[int, ...]:
        """Return an array of integers."""
        return tuple(item.integer() for item in self.items())

    def text(self) -> str:
        """Return a string."""
        if not isinstance(self.value, str):
            raise self.wrong("a string")
        return self.value

    def wrong(self, expected: str) -> PlanError:
        """Return an error that shows the value as JSON has it."""
        got = json.dumps(self.value)
        return PlanError(self.where, expected=expected, got=got if len(got) <= _LONGEST else f"{got[:_LONGEST]}...")
