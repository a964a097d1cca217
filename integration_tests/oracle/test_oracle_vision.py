"""The oracle over families of vision encoders: class tokens, joined patches, tiles, resampled and native pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from cases import in_turn
from oracle import Oracle
from tables import EVEN_EPS, table

Keys = Mapping[str, Any]

SMALL = {"patch": 2, "channels": 1, "width": 24, "layers": 3, "heads": 6, "intermediate": 37}
RESAMPLER = {"kind": "resampler", "hidden": 12, "heads": 6, "queries": 3, "layers": 1}
GREY = {"mean": [0.5], "std": [0.25]}
FAMILIES: dict[str, Keys] = {
    "vit, joined": {"plugin": "vit", "config": {**SMALL, "projector": {"shuffle": 2, "norm": "layer"}}},
    "siglip, native": {
        "plugin": "siglip",
        "config": {**SMALL, "mode": "native", "enlarge": True, "max_patches": 9, "table": 2},
    },
    "siglip, resampled": {"plugin": "siglip", "config": {**SMALL, "size": 6, "projector": RESAMPLER}},
    "clip, tiles": {
        "plugin": "clip",
        "config": {**SMALL, **GREY, "mode": "tiles", "size": 4, "max_tiles": 3, "projector": {"shuffle": 2}},
    },
    "clip, class token": {
        "plugin": "clip",
        "config": {**SMALL, **GREY, "size": 6, "keep_class_token": True, "feature_layer": -2, "final_norm": False},
    },
}
LAYOUTS: dict[str, tuple[Keys, Keys]] = {
    "tp2 sp pp2 + 1": ({"ranks": [0, 1, 2, 3], "tp": 2, "pp": 2, "sequence_parallel": True}, {"ranks": [4]}),
    "lanes 3 to 2": ({"ranks": [0, 1, 2], "dp": 3}, {"ranks": [3, 4], "dp": 2}),
    "cp2 tp3, colocated with tp2": ({"ranks": [0, 1, 2, 3, 4, 5], "cp": 2, "tp": 3}, {"ranks": [0, 1], "tp": 2}),
}


@pytest.mark.parametrize(("family", "layout"), in_turn(FAMILIES, list(LAYOUTS)))
def test_families_of_vision_encoders_may_be_split_alike(family: str, layout: str, oracle: Oracle) -> None:
    """Loss, gradients and weights equal one process, with 0, 1 or 3 pictures of other sizes in each sample."""
    vision, language = LAYOUTS[layout]
    modules = {"vision": {**vision, **FAMILIES[family]}, "language": language}
    # With `EPS` one element's gradient is so near zero that AdamW makes much of its rounding.
    assert oracle.check(table(modules, microbatches=2, eps=EVEN_EPS)) == ""
