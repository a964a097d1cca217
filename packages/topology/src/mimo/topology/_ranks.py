"""Ranks as people write them: ``"0-3"``, ``"0,2,5-7"``, one number or a list."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NewType

from mimo.hooks import ConfigError

Ranks = NewType("Ranks", tuple[int, ...])
"""Ranks of a module; read from ``"0-3"``, ``"0,2,5-7"``, one number or a list."""

MAX_RANKS = 1 << 16
_RANK_DIGITS = 18  # more are not read: Python takes long for thousands
_NO_RANKS = 'Write "0-3", "0,2,5-7" or a list such as [0, 2].'


def parse_ranks(value: Any) -> Ranks:
    """Return the ranks that a setting names, in the order in which it names them.

    Raises:
        ConfigError: it is neither ranges nor whole numbers, or names too many or too high ones, none of which is made;
            ``where`` is empty, for the caller to fill.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        value = [value]
    if isinstance(value, list | tuple):
        if not all(isinstance(rank, int) and not isinstance(rank, bool) for rank in value):
            raise ConfigError("", expected="whole numbers", got=repr(value), fix=_NO_RANKS)
        if len(value) > MAX_RANKS or not all(rank < MAX_RANKS for rank in value):
            raise _too_many(value)
        return Ranks(tuple(value))
    if not isinstance(value, str):
        raise ConfigError("", expected="ranks", got=repr(value), fix=_NO_RANKS)
    ranks: list[int] = []
    for piece in value.split(",") if value.strip() else ():
        span = _span(piece, value)
        if span.stop > MAX_RANKS or len(ranks) + len(span) > MAX_RANKS:
            raise _too_many(value)
        ranks += span
    return Ranks(tuple(ranks))


def _too_many(value: Any) -> ConfigError:
    return ConfigError("", expected=f"at most {MAX_RANKS} ranks, from 0 to {MAX_RANKS - 1}", got=repr(value))


def _span(piece: str, whole: str) -> range:
    found = re.fullmatch(r"\s*([0-9]+)\s*(?:-\s*([0-9]+)\s*)?", piece)
    if found is None:
        raise ConfigError("", expected="ranks", got=repr(whole), fix=_NO_RANKS)
    low, high = found[1], found[2] or found[1]
    if max(len(low), len(high)) > _RANK_DIGITS:
        raise _too_many(whole)
    if int(low) > int(high):
        raise ConfigError("", expected="ranks", got=repr(whole), fix=_NO_RANKS)
    return range(int(low), int(high) + 1)


def show_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as `parse_ranks` reads them, runs shortened: ``0,2,5-7``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    return ",".join("-".join(map(str, span)) for span in spans)
