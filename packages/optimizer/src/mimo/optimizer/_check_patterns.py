"""Refuses patterns that no trained parameter follows, with the closest names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher

from mimo.hooks import ConfigError
from mimo.optimizer._rules import Pattern, Rules

_CLOSEST = 3


def check_patterns(
    rules: Mapping[str, Rules], *, trained: Mapping[str, Iterable[str]], frozen: Mapping[str, Iterable[str]]
) -> None:
    """Refuse a pattern that no parameter follows.

    One of the global table may do nothing where modules have patterns of their own for the same parameters.

    Args:
        rules: of each module.
        trained: full names of the parameters of all stages of each module that are trained.
        frozen: of those that are not.

    Raises:
        ConfigError: by the path of the pattern, with the closest names.
    """
    followed = {
        pattern.where
        for module, names in trained.items()
        for name in names
        if (pattern := rules[module].pattern_of(name)) is not None
    }
    for where, pattern in {one.where: one for each in rules.values() for one in each.patterns}.items():
        if where not in followed:
            _check(pattern, rules, trained, frozen)


def closest(glob: str, names: Iterable[str]) -> list[str]:
    """Return the names that are most like a glob, of those that differ in numbers alone the first."""
    wanted = [word for word in re.split(r"[.*?\[\]!]+", glob) if word]
    kinds: dict[str, str] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\d+", "0", name), name)
    return sorted(kinds.values(), key=lambda name: -_likeness(wanted, name.split(".")))[:_CLOSEST]


def _check(
    pattern: Pattern,
    rules: Mapping[str, Rules],
    trained: Mapping[str, Iterable[str]],
    frozen: Mapping[str, Iterable[str]],
) -> None:
    """Refuse a pattern that nothing follows, unless patterns of another table have taken all that it matches."""
    home = pattern.prefix.removesuffix(".")
    takers = [
        taker
        for module, names in trained.items()
        for name in names
        if pattern.matches(name) and (taker := rules[module].pattern_of(name)) is not None
    ]
    own = [taker for taker in takers if taker.table == pattern.table]
    if takers and not own:
        return
    if own:
        raise ConfigError(
            pattern.where,
            expected="a trained parameter that matches it and none of the patterns before it",
            got=f'only such as match "{own[0].glob}"',
            fix="Put it before that one, or remove it.",
        )
    still = any(pattern.matches(name) for names in frozen.values() for name in names)
    known = [name.removeprefix(pattern.prefix) for module in ([home] if home else trained) for name in trained[module]]
    raise ConfigError(
        pattern.where,
        expected="a pattern that matches trained parameters" + (f" of {home}, by their path inside it" if home else ""),
        got="one that matches frozen parameters alone" if still else "one that matches none",
        fix=f"The closest are {', '.join(closest(pattern.glob, known))}." if known else "Nothing of it is trained.",
    )


def _likeness(wanted: Sequence[str], words: Sequence[str]) -> float:
    """Return how much each wanted word is like the word of a name that is most like it, as a sum of 0 to 1 each."""
    return sum(max(SequenceMatcher(None, one, word).ratio() for word in words) for one in wanted)
