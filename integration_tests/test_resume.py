"""Stopping, loading in the same or another layout, and going on is never having stopped."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pool import Pool
from resuming import check_trajectory, run_and_save, run_steps
from tables import RATE, table, world_of

LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "disjoint": {"vision": {"ranks": [0, 1]}, "language": {"ranks": [2, 3], "tp": 2}},
    "alone": {"vision": {"ranks": [0]}, "language": {"ranks": [0]}},
    "tied stages": {
        "vision": {"ranks": [0, 1, 2], "tp": 3},
        "language": {"ranks": [2, 3, 4, 5], "pp": 2, "tp": 2, "sequence_parallel": True},
    },
    "tied stages, three lanes": {
        "vision": {"ranks": [0]},
        "language": {"ranks": [1, 2, 3, 4, 5, 6], "pp": 2},
    },
    "colocated lanes": {"vision": {"ranks": [0, 1, 2, 3]}, "language": {"ranks": [0, 1, 2, 3], "pp": 2}},
    "experts over lanes": {
        "vision": {"ranks": [0]},
        "language": {"ranks": [0, 1, 2, 3], "tp": 2, "sequence_parallel": True, "ep": 2, "etp": 2},
    },
    "experts over context ranks": {
        "vision": {"ranks": [0, 1, 2]},
        "language": {"ranks": [0, 1, 2, 3], "pp": 2, "cp": 2, "ep": 2},
    },
}
EXPERTS: dict[str, Any] = {
    "experts": 4,
    "experts_per_token": 1,
    "router_normalize": False,
    "expert_bias_rate": 0.01,
    "dense_layers": 1,
    "balance_loss": 0.05,
}
CLEAR_SEED = 62
"""With which no row's choice of experts is left to rounding, see `oracle.GAP`."""


def settings(layout: str, directory: Path) -> dict[str, Any]:
    """Return a run of six steps with a falling learning rate in ``directory``."""
    return settings_of(LAYOUTS[layout], directory)


def settings_of(layout: Mapping[str, Mapping[str, Any]], directory: Path) -> dict[str, Any]:
    """Return the same in any layout."""
    modules = {name: dict(keys) for name, keys in layout.items()}
    for keys in modules.values():
        keys["dp"] = len(keys["ranks"]) // math.prod(keys.get(axis, 1) for axis in ("pp", "cp", "tp"))
    # The vocabulary is large enough for gloo to sum in chunks, in another order for messages of other lengths.
    experts = EXPERTS if "ep" in modules["language"] else {}
    language = {"tied": True, "vocabulary": 1500, **experts}
    found = table(modules, microbatches=2, language=language, seed=CLEAR_SEED)
    found["run"] |= {"steps": 6, "directory": str(directory)}
    found["optimizer"] |= {"lr_schedule": "cosine", "lr_min": RATE / 100, "lr_warmup_steps": 2}
    return found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("tied stages", "tied stages"),
        ("tied stages, three lanes", "tied stages, three lanes"),
        ("disjoint", "alone"),
        ("tied stages", "colocated lanes"),
        ("experts over lanes", "experts over lanes"),
        ("experts over lanes", "experts over context ranks"),
        pytest.param("disjoint", "disjoint", marks=pytest.mark.soak),
        pytest.param("colocated lanes", "colocated lanes", marks=pytest.mark.soak),
        pytest.param("alone", "tied stages", marks=pytest.mark.soak),
        pytest.param("colocated lanes", "disjoint", marks=pytest.mark.soak),
    ],
)
def test_six_steps_equal_three_saved_and_three_more(before: str, after: str, tmp_path: Path, pool: Pool) -> None:
    """The same layout goes on to the bit, another one within the first law: losses, weights and moments."""
    first, second = settings(before, tmp_path), settings(after, tmp_path)
    pool.run(world_of(first), run_and_save, first)
    went_on = pool.run(world_of(second), run_steps, second, 4, 6, str(tmp_path))
    straight = pool.run(world_of(second), run_steps, second, 1, 6, "")
    check_trajectory(went_on, straight, exactly=before == after)


def test_learning_rate_goes_on_across_a_resume(tmp_path: Path, pool: Pool) -> None:
    """From 2e-4 to 2e-6 by a cosine over 10 steps: 1.59e-4, then after a resume at step 3 1.32e-4 and 1.01e-4."""
    found = settings("disjoint", tmp_path)
    found["run"]["steps"] = 10
    found["optimizer"] = {"lr": 2e-4, "lr_min": 2e-6, "lr_schedule": "cosine", "lr_decay_steps": 10}
    before = pool.run(4, run_and_save, found)
    after = pool.run(4, run_steps, found, 4, 5, str(tmp_path))
    rates = [f"{rate:.2e}" for _, _, rate in [*before[0][0], *after[0][0]]]
    assert rates[2:] == ["1.59e-04", "1.32e-04", "1.01e-04"]
