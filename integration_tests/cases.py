"""How cases of a product are chosen to be run every time; ``nox -s soak`` runs the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def in_turn(names: Iterable[Any], values: Sequence[Any]) -> list[Any]:
    """Return parameters (name, value) of the product: each name with one value in turn, the rest for the soak."""
    return [
        pytest.param(name, value, marks=() if number % len(values) == place else pytest.mark.soak)
        for number, name in enumerate(names)
        for place, value in enumerate(values)
    ]
