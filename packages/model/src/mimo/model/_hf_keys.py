"""Reading a published ``config.json``: what it says, and refusing what ours can't do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mimo.hooks import ConfigError

_LARGEST = (1 << 31) - 1  # of a size, far above any


def refuse(key: str, expected: str, got: object, fix: str = "") -> ConfigError:
    """Return the error of a key that says something else than expected."""
    return ConfigError(f"config.json: {key}", expected=expected, got=repr(got), fix=fix)


def only(keys: Mapping[str, Any], key: str, allowed: Sequence[object]) -> None:
    """Refuse what a key says, if it is there and not null, where ours knows no other."""
    if keys.get(key) is not None and keys[key] not in allowed:
        raise refuse(key, f"{allowed[0]!r}, as ours knows no other", keys[key])


def known(keys: Mapping[str, Any], key: str, names: Mapping[str, Any]) -> Any:
    """Return what a name that a key gives is with us, such as that of an activation."""
    if keys[key] not in names:
        raise refuse(key, f"one of {', '.join(names)}", keys[key])
    return names[keys[key]]


def number(keys: Mapping[str, Any], key: str) -> int:
    """Return a whole number, such as a size."""
    value = keys.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value > _LARGEST:
        raise refuse(key, "a whole number" if type(value) is not int else f"at most {_LARGEST}", value)
    return value


def flag(keys: Mapping[str, Any], key: str) -> bool:
    """Return what is true or false; not there and null are false."""
    value = keys.get(key)
    if value is not None and not isinstance(value, bool):
        raise refuse(key, "true or false", value)
    return bool(value)
