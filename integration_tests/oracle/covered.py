"""Which cases of the oracle's files are run every time: one pairwise cover over all files together.

Each file names the cases that show each of its layouts and each of its choices once. Of these are run as many as show
every pair: of a file and a feature of a layout, of a file and a choice, of two features, of two choices. All others are
marked for ``nox -s soak``. A file that is run alone is covered alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from types import ModuleType
from typing import Any

import pytest
from cases import cover
from tables import world_of
from test_oracle import Modules, features_of


def mark_uncovered(items: Iterable[pytest.Item]) -> None:
    """Mark for the soak those of the oracle's tests that the cover does not choose."""
    cases = {
        item: frozenset({item.path.stem, *features(item)})
        for item in items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and item.get_closest_marker("soak") is None
    }
    chosen = cover(cases, cost=cost, once=lambda item: item.nodeid.partition("[")[0]) if cases else set()
    for item in cases.keys() - chosen:
        item.add_marker(pytest.mark.soak)


def features(item: pytest.Function) -> Iterator[str]:
    """Yield what the parameters of a case say of it: features of its layout, and its choices."""
    layouts = layouts_of(item.module)
    for name, value in item.callspec.params.items():
        for choice in value if isinstance(value, tuple | list) and not hasattr(value, "features") else [value]:
            if isinstance(choice, str) and choice in layouts:
                yield from features_of(layouts[choice])
            elif hasattr(choice, "features"):
                yield from choice.features
            else:
                yield f"{name} {choice}"


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
    named = [layouts[value] for value in item.callspec.params.values() if isinstance(value, str) and value in layouts]
    return max((world_of({"modules": modules}) for modules in named), default=1)
