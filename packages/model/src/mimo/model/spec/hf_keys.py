"""Reading a published ``config.json``: what it says, and refusing what ours can't do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

from mimo.hooks import ConfigError

HfKeys: TypeAlias = Mapping[str, Any]
"""Keys of a ``config.json``."""
HF_CARRIED = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
"""What language models of ours compute without: ids of special tokens, and the longest text; see `HfFamily.carried`."""
_LARGEST = (1 << 31) - 1  # of a size, far above any
_LARGEST_EPS = 0.1  # published ones are 1e-3 at most


def hf_refused(key: str, expected: str, got: object, fix: str = "") -> ConfigError:
    """Return the error of a key that says something else than expected."""
    return ConfigError(f"config.json: {key}", expected=expected, got=repr(got), fix=fix)


def hf_only(keys: Mapping[str, Any], key: str, allowed: Sequence[object]) -> None:
    """Refuse what a key says, if it is there and not null, where ours knows no other."""
    if keys.get(key) is not None and keys[key] not in allowed:
        raise hf_refused(key, f"{allowed[0]!r}, as ours knows no other", keys[key])


def hf_no_dropout(keys: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuse keys that drop anything at random while a model is trained; see `HfFamily.dropout`."""
    for key in names:
        if keys.get(key):
            fix = f'To train without: ignore = ["{key}"] in the module\'s settings, or --ignore {key}.'
            raise hf_refused(key, "0.0, as ours drops nothing of that kind at random", keys[key], fix)


def hf_known(keys: Mapping[str, Any], key: str, names: Mapping[str, Any]) -> Any:
    """Return what a name that a key gives is with us, such as that of an activation."""
    if keys[key] not in names:
        raise hf_refused(key, f"one of {', '.join(names)}", keys[key])
    return names[keys[key]]


def hf_number(keys: Mapping[str, Any], key: str, *, low: int = 1) -> int:
    """Return a whole number of at least ``low``, such as a size."""
    value = keys.get(key)
    if isinstance(value, float) and value.is_integer():  # as some writers of JSON have it
        value = int(value)
    if type(value) is not int:
        raise hf_refused(key, "a whole number", value)
    if not low <= value <= _LARGEST:
        raise hf_refused(key, f"at least {low}" if value < low else f"at most {_LARGEST}", value)
    return value


def hf_real(keys: Mapping[str, Any], key: str, *, low: float, most: float, above: bool = False) -> float:
    """Return a number from ``low`` (with ``above``, only above it) to ``most``; what it can mean lies in between."""
    value: Any = keys.get(key)
    is_number = type(value) in {int, float} and math.isfinite(value)
    if not is_number or not low <= value <= most or (above and value == low):
        between = f"above {low:g} and up to {most:g}" if above else f"from {low:g} to {most:g}"
        raise hf_refused(key, f"a number {between}", value)
    return cast("float", value)


def hf_rate(keys: Mapping[str, Any], key: str) -> float:
    """Return at which rate features or paths are dropped at random; 0 where the key is not there or null."""
    value: Any = keys.get(key)
    if value is None:
        return 0.0
    if type(value) not in {int, float} or not 0 <= value < 1:
        raise hf_refused(key, "a rate of 0 or more and less than 1", value)
    return float(value)


def hf_small(keys: Mapping[str, Any], key: str) -> float:
    """Return what is added below a root or a quotient: above 0, and far below what it is added to."""
    return hf_real(keys, key, low=0, most=_LARGEST_EPS, above=True)


def hf_divisor(keys: Mapping[str, Any], key: str, *, of: str) -> int:
    """Return the whole number of a key that must divide another's; that one where it is not there or null."""
    total = hf_number(keys, of)
    value = total if keys.get(key) is None else hf_number(keys, key)
    if total % value:
        raise hf_refused(key, f"a divisor of {of} = {total}", value)
    return value


def hf_flag(keys: Mapping[str, Any], key: str) -> bool:
    """Return what is true or false; not there and null are false."""
    value = keys.get(key)
    if value is not None and not isinstance(value, bool):
        raise hf_refused(key, "true or false", value)
    return bool(value)
