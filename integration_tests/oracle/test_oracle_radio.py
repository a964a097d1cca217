"""The encoder ``radio`` before a decoder, in the oracle: every layout agrees with one plain process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from cases import in_turn
from oracle import Oracle
from tables import EVEN_EPS, table
from test_oracle import SP, on
from test_oracle_mamba import CONFIG as HYBRID

SMALL = {"patch": 2, "width": 24, "layers": 3, "heads": 6, "intermediate": 37, "positions": 3, "registers": 2}
NEMOTRON = {"hidden": 20, "shuffle": 2, "norm": "rms", "activation": "squared_relu", "bias": False}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "patches joined": {**SMALL, "min_patches": 8, "max_patches": 24, "projector": NEMOTRON},
    "class tokens kept": {**SMALL, "keep": [0, 2]},
    "tiles": {**SMALL, "mode": "tiles", "size": 4, "max_tiles": 2, "projector": {"kind": "linear", "shuffle": 2}},
}
LAYOUTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "tp2 dp2, as the recipe has it": {"vision": on(0, 3, tp=2), "language": on(4, 7, tp=2, **SP)},
    "tp3 sp, colocated": {"vision": on(0, 2, tp=3, **SP), "language": on(0, 2)},
    "pp2 tp2 sp": {"vision": on(0, 3, pp=2, tp=2, **SP), "language": on(4, 5, tp=2)},
    "cp2 to lanes 1 to 2": {"vision": on(0, 1, cp=2), "language": on(1, 2, pp=2)},
    "pp3, its projector alone trains": {"vision": on(0, 2, pp=3, frozen=["encoder"]), "language": on(3, 3)},
    "lanes 3 to 2": {"vision": on(0, 2), "language": on(1, 2, recompute="full")},
}


@pytest.mark.parametrize(("layout", "config"), in_turn(LAYOUTS, list(CONFIGS)))
def test_layout_changes_nothing(layout: str, config: str, oracle: Oracle) -> None:
    """Class tokens, positions and projector learn alike wherever rows are cut."""
    modules = {name: dict(keys) for name, keys in LAYOUTS[layout].items()}
    modules["vision"] |= {"plugin": "radio", "config": CONFIGS[config]}
    assert oracle.check(table(modules, microbatches=2)) == ""


@pytest.mark.parametrize(("layout", "pictures"), in_turn(LAYOUTS, ["first", "none"]))
def test_lanes_and_steps_without_pictures_are_ordinary(layout: str, pictures: str, oracle: Oracle) -> None:
    """Nothing hangs or changes where hardly a sample has a picture, or none has."""
    modules = {name: dict(keys) for name, keys in LAYOUTS[layout].items()}
    modules["vision"] |= {"plugin": "radio", "config": CONFIGS["patches joined"]}
    assert oracle.check(table(modules, microbatches=4, pictures=pictures)) == ""


@pytest.mark.soak
@pytest.mark.parametrize("microbatches", [1, pytest.param(4, marks=pytest.mark.soak)])
def test_radio_and_hybrid_as_the_recipe_has_them(microbatches: int, oracle: Oracle) -> None:
    """Two lanes of two tensor ranks each, experts over all four ranks of the language model."""
    modules = {
        "vision": {**on(0, 3, tp=2), "plugin": "radio", "config": CONFIGS["patches joined"]},
        "language": {**on(4, 7, tp=2, ep=4, **SP), "plugin": "hybrid", "config": HYBRID},
    }
    assert oracle.check(oracle.clear(table(modules, microbatches=microbatches, eps=EVEN_EPS))) == ""
