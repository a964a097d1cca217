"""Values that no setting expects: of another type, huge, negative, no numbers, unprintable, nested."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

_TEXTS = (
    "",
    " ",
    "0-99999999999",
    "0-3,2-5",
    "3-0",
    "-1",
    "0," * 5000,
    "\u0663-\u0665",
    "\x1b[2J\x1b[31m",
    "\x9b31m",
    "a\nb\r",
    "\x00",
    "\u202egnp.exe",
    "[red]x[/red]",
    "[/nothing]",
    "{0}%s${x}",
    "../" * 100,
    "/proc/self/mem",
    "/dev/zero",
    "é" * 1000,
    "x" * 200_000,
    "🙂",
    "nan",
    "none",
    "auto",
    "true",
    "*" * 200,
    "M" * 5000,
)
_INTEGERS = (
    *(0, 1, -1, 2, 3, 7, 255, 256, 1000, 65535, 65536, 100_000, 1_000_000, 10**7),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 10**12, 2**53, 2**62, 2**63 - 1, -(2**63), 2**64, 10**30, -(10**30)),
)
_FLOATS = (
    *(0.0, -0.0, 0.5, -1.5, 1e-320, 1e-30, 1e12, 1e30, 1e38, 1e300, 1.7e308, -1e308),
    *(float("inf"), float("-inf"), float("nan")),
)


def hostile_text(rng: random.Random) -> str:
    """Draw a text."""
    return rng.choice(_TEXTS)


def _integer(rng: random.Random) -> int:
    return rng.choice(_INTEGERS)


def _float(rng: random.Random) -> float:
    return rng.choice(_FLOATS)


def _truth(rng: random.Random) -> bool:
    return rng.random() < 0.5


def _list(rng: random.Random) -> list[Any]:
    return rng.choice(
        (
            [],
            [_integer(rng), _integer(rng)],
            [_float(rng)] * rng.choice((1, 2, 3)),
            [hostile_text(rng)[:100], "x"],
            list(range(rng.choice((3, 1000, 100_000)))),
            [[]],
            [{}],
            [[[[[[[[1]]]]]]]],
            _deep(rng.choice((20, 31, 33, 100))),
        )
    )


def _deep(levels: int) -> list[Any]:
    value: list[Any] = [1]
    for _ in range(levels):
        value = [value]
    return value


def _table(rng: random.Random) -> dict[str, Any]:
    return rng.choice(
        (
            {},
            {"plugin": "vit"},
            {"x": {"y": {"z": _integer(rng)}}},
            {hostile_text(rng)[:50]: _integer(rng)},
            {str(index): index for index in range(rng.choice((10, 2000)))},
        )
    )


HOSTILE: Sequence[Callable[[random.Random], Any]] = (
    _integer,
    _integer,
    _integer,
    _float,
    _float,
    hostile_text,
    hostile_text,
    _truth,
    _list,
    _table,
)
"""What draws a value; numbers more often than others."""
