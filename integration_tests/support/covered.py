"""Which cases of the tests that train are run every time: one pairwise cover over the files of several folders.

Each file names the cases that show each of its layouts and each of its choices. Of these are run as many as show every
pair of two features of a layout, in no matter which file; each function of a test once, unless it is marked itself;
and each value of a parameter that is named by ``@pytest.mark.each``. All others are marked for ``nox -s soak``. A file
that is run alone is covered alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import chain
from types import ModuleType
from typing import Any

import pytest
from cases import Modules, cover, features_of
from tables import world_of

RANKS = frozenset({"pool", "oracle"})
"""Fixtures of tests that start ranks; all others are run in all of their cases."""


def mark_uncovered(items: Iterable[pytest.Item]) -> None:
    """Mark for the soak those of these tests that the cover does not choose."""
    cases = [
        item
        for item in items
        if isinstance(item, pytest.Function)
        and hasattr(item, "callspec")
        and RANKS.intersection(item.fixturenames)
        and item.get_closest_marker("soak") is None
    ]
    chosen = cover({item: features(item) for item in cases}, cost=cost, once=once) if cases else set()
    for item in cases:
        if item not in chosen:
            item.add_marker(pytest.mark.soak)


def features(item: pytest.Function) -> set[str]:
    """Return the features of the layouts among a case's parameters."""
    layouts = layouts_of(item.module)
    found = (
        features_of(layouts[value]) if is_name(value, layouts) else getattr(value, "features", ())
        for value in parameters(item)
    )
    return {*chain.from_iterable(found)}


def once(item: pytest.Function) -> set[str]:
    """Return what has to be shown in some case: its function, and the values of parameters that are named for it.

    Raises:
        pytest.UsageError: no such parameter.
    """
    test = f"{item.path.stem} {item.originalname}"
    named = {name for mark in item.iter_markers("each") for name in mark.args}
    if unknown := named - item.callspec.params.keys():
        raise pytest.UsageError(f"{item.nodeid}: each: expected its parameters, got {sorted(unknown)}")
    return {test, *(f"{test} {name} {value}" for name, value in item.callspec.params.items() if name in named)}


def parameters(item: pytest.Function) -> Iterator[Any]:
    """Yield the values of a case's parameters, of tuples and lists each value."""
    for value in item.callspec.params.values():
        if isinstance(value, tuple | list) and not hasattr(value, "features"):
            yield from value
        else:
            yield value


def is_name(value: Any, layouts: Mapping[str, Modules]) -> bool:
    """Return whether a value names a layout."""
    return isinstance(value, str) and value in layouts


@cache
def layouts_of(module: ModuleType) -> Mapping[str, Modules]:
    """Return the layouts by name of a file of tests."""
    tables = [table for table in vars(module).values() if isinstance(table, Mapping)]
    return {name: modules for table in tables for name, modules in table.items() if is_layout(modules)}


def is_layout(value: Any) -> bool:
    """Return whether a value is the modules of a layout."""
    return isinstance(value, Mapping) and "language" in value and "ranks" in value["language"]


def cost(item: pytest.Function) -> int:
    """Return the ranks of a case's layout."""
    layouts = layouts_of(item.module)
    named = [layouts[value] for value in parameters(item) if is_name(value, layouts)]
    return max((world_of({"modules": modules}) for modules in named), default=1)
