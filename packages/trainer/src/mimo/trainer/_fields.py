"""How one setting is declared: its default, its comment in `mimo init`, and the validators that settings share.

Validators name the setting alone; whoever structures a table puts the table's path before it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NewType, TypeAlias

import attrs

from mimo.hooks import ConfigError

Ranks = NewType("Ranks", tuple[int, ...])
"""Ranks of a module; read from ``"0-3"``, ``"0,2,5-7"``, one number or a list."""

Validator: TypeAlias = Callable[[Any, "attrs.Attribute[Any]", Any], None]

COMMENT = "comment"
REST = "rest"
MAX_RANKS = 1 << 16
_RANK_DIGITS = 18  # more are not read: Python takes long for thousands
_NO_RANKS = 'Write "0-3", "0,2,5-7" or a list such as [0, 2].'


def setting(comment: str, *, default: Any = attrs.NOTHING, validator: Sequence[Validator] = ()) -> Any:
    """Declare a setting; without a default it is required."""
    return attrs.field(default=default, validator=list(validator), metadata={COMMENT: comment})


def rest(comment: str) -> Any:
    """Declare the field that takes the keys of a table that belong to its plugin."""
    return attrs.field(factory=dict, metadata={COMMENT: comment, REST: True})


def own_keys(cls: type) -> tuple[str, ...]:
    """Return the keys of a table that are not its plugin's."""
    return tuple(field.name for field in attrs.fields(cls) if not field.metadata.get(REST))


def rest_field(cls: type) -> str | None:
    """Return the name of the field that takes the plugin's keys, if the class has one."""
    return next((field.name for field in attrs.fields(cls) if field.metadata.get(REST)), None)


def at_least(least: int) -> Validator:
    """Return a validator that refuses smaller numbers."""

    def check(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not value >= least:  # so that a NaN is refused too
            raise ConfigError(attribute.name, expected=f"{least} or more", got=repr(value))

    return check


def at_most(most: float) -> Validator:
    """Return a validator that refuses larger numbers."""

    def check(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not value <= most:
            raise ConfigError(attribute.name, expected=f"at most {most}", got=repr(value))

    return check


def finite(_instance: Any, attribute: attrs.Attribute[Any], value: float) -> None:
    """Refuse an infinite number."""
    if math.isinf(value):
        raise ConfigError(attribute.name, expected="a finite number", got=repr(value))


def not_empty(_instance: Any, attribute: attrs.Attribute[Any], value: str) -> None:
    """Refuse empty text."""
    if not value:
        raise ConfigError(attribute.name, expected="some text", got="''")


def one_folder(_instance: Any, attribute: attrs.Attribute[Any], value: str) -> None:
    """Refuse text that cannot be the name of one folder."""
    if not value or value in {".", ".."} or set(value) & set("/\\\0"):
        raise ConfigError(attribute.name, expected="a name that can be a folder's", got=repr(value))


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
