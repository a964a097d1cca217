"""The reference recipe in examples: what it is, and that a narrow twin of it trains, stops and resumes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from commands import here, mimo
from house import ROOT
from resuming import check_going_on
from tables import Table

from mimo.testing import Pool

RECIPE = ROOT / "examples" / "nemotron-moe-vlm-20l.toml"
NARROW: dict[str, dict[str, Any]] = {
    "vision": {"patch": 2, "width": 24, "layers": 2, "heads": 6, "intermediate": 40, "positions": 6},
    "language": {
        "hidden": 24,
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 4,
        "experts": 8,
        "experts_per_token": 3,
        "expert_intermediate": 12,
        "shared_intermediate": 16,
        "mamba_heads": 8,
        "mamba_head_dim": 4,
        "mamba_groups": 2,
        "mamba_state": 8,
        "vocabulary": 0,
    },
}
"""Widths of the twin; its pattern, activations, router and all else are the recipe's."""
PATCHES = {"min_patches": 16, "max_patches": 16}
PROJECTOR = {"hidden": 20, "shuffle": 2, "norm": "rms", "activation": "squared_relu", "bias": False}


def _twin(folder: Path) -> Table:
    """Return the recipe made narrow, with half of its batch; its grids and optimizer are as they are."""
    found = tomllib.loads(RECIPE.read_text())
    for name, widths in NARROW.items():
        found["modules"][name]["config"] |= widths
    vision = found["modules"]["vision"]["config"]
    assert vision["projector"] == {**PROJECTOR, "hidden": 20480}
    vision |= {**PATCHES, "projector": PROJECTOR}
    found["run"] |= {"directory": str(folder), "precision": "fp32", "device": "cpu", "steps": 4, "global_batch": 4}
    found["data"] |= {"text": 12, "height": 8, "width": 8, "max_tokens": 16}
    for module in found["modules"].values():
        first, last = map(int, module["ranks"].split("-"))
        module["ranks"] = list(range(first, last + 1))
    found["checkpoint"] = {"interval": 3, "asynchronous": False}
    return found


def test_check_shows_what_the_recipe_takes() -> None:
    """Parameters and operations of each part and memory of each rank, though no machine here could hold them."""
    shown = here("check", RECIPE).printed
    assert re.search(r"vision +radio +0-3 +1 +2 +1 +2 +- +-", shown)
    assert re.search(r"language +hybrid +4-7 +1 +2 +1 +2 +4 +1", shown)
    assert re.search(r"vision +encoder +651,645,440 +651,645,440 +11\.8\d +23\.\d+ +0", shown)
    assert re.search(r"all +12,327,236,928 +12,327,235,904 +21\d", shown)
    assert re.search(r"\n4-7 +10,9\d\d\.\d MiB", shown)


@pytest.mark.soak
def test_narrow_twin_trains_stops_and_resumes(pool: Pool, tmp_path: Path) -> None:
    """On its eight processes: from what is saved after step 3, step 4 is done again to the bit."""
    settings = _twin(tmp_path)
    straight = check_going_on(pool, settings, settings, exactly=True)
    losses = [step[0] for step in straight[0][0]]
    assert len(set(losses)) == 4
    rates = [step[2] for step in straight[0][0]]
    assert 2e-4 > rates[0] > rates[1] > rates[2] > rates[3] > 2e-6


@pytest.mark.soak
def test_narrow_twin_by_commands(tmp_path: Path) -> None:
    """What a user types: trained to step 3, then to step 4 in the same directory."""
    words = [f"{key}={value}" for key, value in _words(_twin(tmp_path / "run"))]
    assert "step 3/3" in mimo("train", RECIPE, *words, "run.steps=3").printed
    shown = mimo("train", RECIPE, *words, "checkpoint.load=latest").printed
    assert "step 3 loaded" in shown
    assert "step 4/4" in shown
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert {"step_00000003", "step_00000004"} <= set(names)


def _words(settings: Table, where: str = "") -> list[tuple[str, Any]]:
    """Return the keys of the twin by path, as a command line has them."""
    found = []
    for key, value in settings.items():
        if isinstance(value, dict):
            found += _words(value, f"{where}{key}.")
        elif key not in {"ranks", "betas", "plugin"}:
            found.append((f"{where}{key}", str(value).lower() if isinstance(value, bool) else value))
    return found
