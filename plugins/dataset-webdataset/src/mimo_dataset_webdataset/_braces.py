"""Names of shards from one expression: ``train-{000000..000127}.tar``, ``{web,books}/{0..9}.tar``."""

from __future__ import annotations

import re
from itertools import product

MAX_SHARDS = 1 << 20
"""Names of one expression."""
_RANGE = re.compile(r"([0-9]{1,18})\.\.([0-9]{1,18})")


def expand_braces(expression: str) -> list[str]:
    """Return the names of an expression in its order; digits that begin with 0 keep their number.

    Raises:
        ValueError: a brace isn't closed, stands in another one, holds no list or range, or there are too many names.
    """
    parts = re.split(r"\{([^{}]*)\}", expression)
    if any(letter in part for part in parts[::2] for letter in "{}"):
        msg = "a brace without its other half, or one within another"
        raise ValueError(msg)
    options: list[list[str]] = []
    count = 1
    for index, part in enumerate(parts):
        limit = MAX_SHARDS // max(count, 1)
        options.append(_options(part, limit) if index % 2 else [part])
        count *= len(options[-1])
    return ["".join(found) for found in product(*options)]


def _options(inner: str, limit: int) -> list[str]:
    if bounds := _RANGE.fullmatch(inner):
        first, last = int(bounds[1]), int(bounds[2])
        width = max(map(len, bounds.groups())) if any(part.startswith("0") for part in bounds.groups()) else 0
        width = 0 if bounds[1] == "0" and not bounds[2].startswith("0") else width
        if last < first:
            msg = f"the range {{{inner}}}, which runs backwards"
            raise ValueError(msg)
        if last - first >= limit:
            msg = f"more than {MAX_SHARDS:,} names"
            raise ValueError(msg)
        return [f"{number:0{width}d}" for number in range(first, last + 1)]
    found = inner.split(",")
    if len(found) < 2:  # noqa: PLR2004 - one name is no list
        msg = f"{{{inner}}}, which is neither a list {{a,b}} nor a range {{000..127}}"
        raise ValueError(msg)
    if len(found) > limit:
        msg = f"more than {MAX_SHARDS:,} names"
        raise ValueError(msg)
    return found
