"""How cases of a product are chosen to be run every time; ``nox -s soak`` runs the others."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import reduce
from itertools import chain
from typing import Any, TypeVar

import pytest

C = TypeVar("C")
Modules = Mapping[str, Mapping[str, Any]]
"""The keys of a layout's modules."""


def in_turn(names: Iterable[Any], values: Sequence[Any]) -> list[Any]:
    """Return parameters (name, value) of the product: each name with one value in turn, the rest for the soak."""
    return [
        pytest.param(name, value, marks=() if number % len(values) == place else pytest.mark.soak)
        for number, name in enumerate(names)
        for place, value in enumerate(values)
    ]


def some(every: Iterable[Any], ordinary: Collection[Any]) -> list[Any]:
    """Return parameters, of which all but some are for the soak."""
    marks = {one: () if one in ordinary else pytest.mark.soak for one in every}
    return [pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=mark) for one, mark in marks.items()]


def cover(
    features: Mapping[C, Collection[str]],
    shown: Iterable[Collection[str]] = (),
    cost: Callable[[C], int] = lambda _case: 0,
    once: Callable[[C], Collection[str]] = lambda _case: (),
) -> set[C]:
    """Return cases in which every pair of features occurs that occurs in any case.

    Args:
        features: of each case.
        shown: features of cases that are run anyhow.
        cost: of each case; of those that show as much, the cheapest is taken.
        once: what else each case has, each of which is to occur in some case, in no matter what company.
    """
    shown = list(shown)
    numbers = {one: number for number, one in enumerate(sorted({*chain(*features.values(), *shown)}))}
    others = sorted({*chain.from_iterable(map(once, features))})
    beyond = {one: 1 << len(numbers) ** 2 + number for number, one in enumerate(others)}

    def pairs(found: Collection[str]) -> int:
        """Return a number with a bit for each pair."""
        row = sum(1 << numbers[one] for one in found)
        return sum(row << numbers[one] * len(numbers) for one in found)

    order = sorted(random.Random(0).sample(list(features), len(features)), key=cost)
    of = {case: pairs(features[case]) | sum(beyond[one] for one in {*once(case)}) for case in order}
    wanted = missing = reduce(operator.or_, of.values()) & ~reduce(operator.or_, map(pairs, shown), 0)
    chosen = []
    most = max(row.bit_count() for row in of.values())
    while missing:
        for case in order:
            if (of[case] & missing).bit_count() >= most:
                missing &= ~of[case]
                chosen.append(case)
        most = most * 9 // 10
    for case in sorted(chosen, key=cost, reverse=True):
        rest = reduce(operator.or_, (of[other] for other in chosen if other != case), 0)
        if not of[case] & wanted & ~rest:  # those that were taken later show it too
            chosen.remove(case)
    return set(chosen)


def covering(
    features: Mapping[C, Collection[str]],
    shown: Iterable[Collection[str]] = (),
    cost: Callable[[C], int] = lambda _case: 0,
    once: Callable[[C], Collection[str]] = lambda _case: (),
) -> list[Any]:
    """Return all cases as parameters, those that `cover` does not choose for the soak."""
    chosen = cover(features, shown, cost, once)
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id=str(case) if not isinstance(case, tuple) else ", ".join(map(str, case)),
            marks=() if case in chosen else pytest.mark.soak,
        )
        for case in features
    ]


def features_of(modules: Modules) -> set[str]:
    """Return what a layout has, for pairs to be made of; see `cover`."""
    axes = ("pp", "dp", "cp", "tp", "ep", "etp", "sequence_parallel")
    said = {f"{name} {axis}": str(keys.get(axis, 1)) for name, keys in modules.items() for axis in axes}
    found = {what for what, size in said.items() if size not in ("1", "False")}
    ranks = {name: set(keys["ranks"]) for name, keys in modules.items()}
    for encoder in ranks.keys() - {"language"}:
        shared = ranks[encoder] & ranks["language"]
        found.add("disjoint" if not shared else "colocated" if len(shared) == len(ranks[encoder]) else "overlapping")
    return {f"{len(modules)} modules", *found}
