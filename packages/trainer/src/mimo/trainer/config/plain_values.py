"""Bounds on the plain data of any settings file, checked before a class reads it.

A class bounds what its fields mean (`mimo.hooks.check_at_most`); this bounds how large a value may be at all, so that
no library on the way meets a number, a text or a nesting that it was not made for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mimo.hooks import ConfigError

MAX_FILE_BYTES = 4 << 20
MAX_DEPTH = 32
MAX_ENTRIES = 1 << 20
"""Of one list; of one table `MAX_KEYS`."""
MAX_KEYS = 1024
MAX_TEXT = 1 << 16
MAX_BITS = 63
MAX_FLOAT = 1e30
"""Far below the largest number of fp32, so that a product with it is one too; infinity is for the field to judge."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_WHOLE = f"whole numbers below 2^{MAX_BITS}"
_TOO_DEEP = f"tables and lists at most {MAX_DEPTH} deep"


def check_plain_values(table: Mapping[str, Any]) -> None:
    """Refuse a value that is too large for any setting.

    Args:
        table: the whole file, as TOML or JSON gives it.

    Raises:
        ConfigError: by the path of the value.
    """
    waiting: list[tuple[str, Any, int]] = [("", table, 0)]
    while waiting:
        where, value, depth = waiting.pop()
        if isinstance(value, Mapping | list | tuple):
            if depth == MAX_DEPTH:
                raise ConfigError(where, expected=_TOO_DEEP, got="more")
            waiting += [(path, one, depth + 1) for path, one in _inside(where, value)]
        else:
            _check_one(where, value)


def check_words(words: Sequence[str]) -> None:
    """Refuse words of a command line with control characters, which whoever names them would send to the terminal.

    Raises:
        ConfigError: by the path of the setting that it sets, or by its place.
    """
    for place, word in enumerate(words, start=1):
        if found := _CONTROL.search(word):
            key, equals, _ = word.partition("=")
            raise ConfigError(
                key if equals and not _CONTROL.search(key) else f"word {place}",
                expected="text without control characters",
                got=f"{found[0]!r} in {word!r}",
            )


def join_path(where: str, key: str) -> str:
    """Return the path of a key of a table, written as TOML asks for."""
    written = key if re.fullmatch(r"[\w-]+", key) else f'"{key}"'
    return f"{where}.{written}" if where else written


def too_deep(where: str) -> ConfigError:
    """Return the error of data that are nested so deep that they can't even be read."""
    return ConfigError(where, expected=_TOO_DEEP, got="more", fix="No setting needs so many.")


def too_long_a_number(where: str) -> ConfigError:
    """Return the error of a whole number of so many digits that it can't even be read."""
    return ConfigError(where, expected=_WHOLE, got="one of thousands of digits")


def _inside(where: str, value: Any) -> Iterator[tuple[str, Any]]:
    is_table = isinstance(value, Mapping)
    limit, noun = (MAX_KEYS, "keys") if is_table else (MAX_ENTRIES, "entries")
    if len(value) > limit:
        raise ConfigError(where or "the file", expected=f"at most {limit} {noun}", got=f"{len(value)}")
    if not is_table:
        for index, one in enumerate(value):
            yield f"{where}[{index}]", one
        return
    for key, one in value.items():
        path = join_path(where, key)
        _check_text(path, key)
        yield path, one


def _check_one(where: str, value: Any) -> None:
    if isinstance(value, str):
        _check_text(where, value)
    elif isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ConfigError(where, expected=_WHOLE, got=f"one of {value.bit_length()} bits")
    elif isinstance(value, float) and math.isnan(value):
        raise ConfigError(where, expected="a number", got="nan")
    elif isinstance(value, float) and MAX_FLOAT < abs(value) < math.inf:
        raise ConfigError(where, expected=f"a number of at most {MAX_FLOAT:g}", got=repr(value))


def _check_text(where: str, text: str) -> None:
    if len(text) > MAX_TEXT:
        raise ConfigError(where, expected=f"at most {MAX_TEXT} characters", got=f"{len(text)}: {text[:40]!r}…")
    if found := _CONTROL.search(text):
        raise ConfigError(
            where,
            expected="text without control characters, which a terminal would obey",
            got=f"{found[0]!r} at character {found.start() + 1}",
            fix="Remove it.",
        )
