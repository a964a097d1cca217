"""Values other than tensors as JSON, from which they are read back exactly; what JSON would change is refused."""

from __future__ import annotations

import json
import math
from typing import Any

from mimo.hooks import CheckpointError

_FLOAT = "$float"
_LONGEST_INTEGER_BITS = 8192  # Python refuses to read much longer ones back


def encode(value: Any, where: str) -> Any:
    """Return ``value`` as plain JSON data; `decode` is its inverse.

    JSON has no NaN and no infinities: they become ``{"$float": "nan"}``. A user's dict of that form gets one more
    dollar before its key. Tuples and subclasses (`numpy.float64`) would come back as another type, so they are refused.

    Args:
        value: number, string, bool, None, list, or dict with text keys.
        where: its key path, for the message.

    Raises:
        CheckpointError: a part is not JSON; the message names its path.
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
    """Return encoded ``value`` as text; values that differ only in the order of keys have the same text."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"), sort_keys=True)


def _is_tag(value: dict[str, Any]) -> bool:
    return len(value) == 1 and (key := next(iter(value))).startswith("$") and key.lstrip("$") == "float"
