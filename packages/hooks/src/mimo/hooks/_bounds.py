"""Fields of settings: a number that is too small or too large is refused by its path; one field may take other keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import attrs

from mimo.hooks._errors import ConfigError

_SHOWN_BITS = 4096

Validator: TypeAlias = Callable[[Any, "attrs.Attribute[Any]", Any], None]


OTHER_KEYS = "rest"
"""In the metadata of a field: it takes the keys of its table that no other field has."""


def other_keys() -> Any:
    """Declare the field of a class of settings that takes the keys that no other field has, as a plugin's."""
    return attrs.field(factory=dict, metadata={OTHER_KEYS: True})


def must_be(expected: str, holds: Callable[[Any], bool], *, where: str = "") -> Validator:
    """Return a validator of an attrs field that raises `ConfigError` where ``holds`` of the value is false.

    Args:
        expected: what is allowed, as a noun phrase.
        holds: whether a value is allowed. Comparisons with NaN are false, so say what holds, not what doesn't.
        where: path of the config. Without one the error names the field alone, and whoever structures the table puts
            its path before it.
    """

    def check(_config: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not holds(value):
            path = f"{where}.{attribute.name}" if where else attribute.name
            raise ConfigError(path, expected=expected, got=_shown(value))

    return check


def at_least(low: float, *, where: str = "") -> Validator:
    """Return a validator that refuses smaller numbers, and NaN."""
    return must_be(f"{low} or more", lambda value: value >= low, where=where)


def at_most(high: float, *, where: str = "") -> Validator:
    """Return a validator that refuses larger numbers, and NaN."""
    return must_be(f"at most {high}", lambda value: value <= high, where=where)


def from_zero(*, where: str = "") -> Validator:
    """Return a validator that refuses negative numbers, infinity and NaN."""
    return must_be("a finite number of 0 or more", lambda value: 0 <= value < math.inf, where=where)


def above_zero(*, where: str = "") -> Validator:
    """Return a validator that refuses 0, negative numbers, infinity and NaN."""
    return must_be("a finite number above 0", lambda value: 0 < value < math.inf, where=where)


def is_rate(*, where: str = "") -> Validator:
    """Return a validator that refuses what isn't the rate of something that happens at random, and not always."""
    return must_be("a rate of 0 or more and less than 1", lambda value: 0 <= value < 1, where=where)


def check_at_most(config: object, limits: Mapping[str, float], *, where: str) -> None:
    """Refuse numbers of a config that are larger than anything that could be built or run.

    Args:
        config: has a field of each name.
        limits: by field, the largest number that it may be.
        where: path of the config.

    Raises:
        ConfigError: by the path of the field.
    """
    for name, limit in limits.items():
        value = getattr(config, name)
        if value > limit:
            raise ConfigError(f"{where}.{name}", expected=f"at most {limit}", got=_shown(value))


def _shown(value: Any) -> str:
    """Return a value as it is written, unless Python refuses to write so many digits."""
    bits = value.bit_length() if isinstance(value, int) else 0
    return f"a number of {bits} bits" if bits > _SHOWN_BITS else repr(value)
