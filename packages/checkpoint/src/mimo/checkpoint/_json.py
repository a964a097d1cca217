"""JSON that gives back exactly the value that was put in, or refuses it: the form of every value that is no tensor."""

from __future__ import annotations

import json
import math
from typing import Any

from mimo.hooks import CheckpointError

_FLOAT = "$float"
_LONGEST_INTEGER_BITS = 8192  # Python refuses to read much longer ones back


def encode(value: Any, where: str) -> Any:
    """Return ``value`` as plain JSON data; `decode` is its inverse.

    JSON has no NaN and no infinities: they become ``{"$float": "nan"}``, and a dict of the user's that looks like that
    gets one more dollar. Tuples and subclasses (`numpy.float64`) would come back as another type, so they are refused.

    Args:
        value: number, string, bool, None, list, or dict with text keys.
        where: its key path, for the message.

    Raises:
        CheckpointError: names the path of the part that is not JSON.
    """
    kind = type(value)
    if value is None or kind in (bool, str) or (kind is int and value.bit_length() <= _LONGEST_INTEGER_BITS):
        return value
    if kind is float:
        return value if math.isfinite(value) else {_FLOAT: repr(value)}
    if kind is list:
        return [encode(part, f"{where}[{index}]") for index, part in enumerate(value)]
    if kind is dict and all(type(key) is str for key in value):
        found = {key: encode(part, f"{where}.{key}") for key, part in value.items()}
        return {f"${key}": part for key, part in found.items()} if _is_tag(found) else found
    raise CheckpointError(
        where,
        expected="a JSON value: number, string, bool, None, list, or dict with text keys",
        got="a dict with other keys" if kind is dict else f"a {kind.__module__}.{kind.__qualname__}",
        fix="Convert it to one of these, for example a tuple to a list.",
    )


def decode(value: Any) -> Any:
    """Return the value that `encode` was given."""
    if isinstance(value, list):
        return [decode(part) for part in value]
    if isinstance(value, dict):
        if _is_tag(value):
            ((key, part),) = value.items()
            return float(part) if key == _FLOAT else {key[1:]: decode(part)}
        return {key: decode(part) for key, part in value.items()}
    return value


def write(value: Any) -> str:
    """Return encoded ``value`` as text, equal for equal values whatever the order of their keys."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"), sort_keys=True)


def read(text: str | bytes) -> Any:
    """Return the encoded value that ``text`` holds.

    Raises:
        ValueError: it is no JSON, holds NaN or an infinity, gives one name twice, or nests absurdly deep.
    """
    try:
        return json.loads(text, object_pairs_hook=refuse_repeats, parse_constant=_refuse_constant)
    except RecursionError:
        msg = "too many levels of nesting"
        raise ValueError(msg) from None


def _is_tag(value: dict[str, Any]) -> bool:
    return len(value) == 1 and (key := next(iter(value))).startswith("$") and key.lstrip("$") == "float"


def refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object's names and values, each name given once; for `json.loads`."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        msg = f"the name {next(name for name in names if names.count(name) > 1)!r} is given twice"
        raise ValueError(msg)
    return found


def _refuse_constant(token: str) -> Any:
    msg = f"{token} is not JSON"
    raise ValueError(msg)
