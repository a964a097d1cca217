"""The oracle over a model that reads, is taught and draws: text, pictures, a teacher and a flow in one graph."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from oracle import Oracle
from resuming import check_going_on
from tables import SCHEDULES, Table, scheduled, table
from test_generators import FLOW, ROLES, on
from test_oracle_lora import run_adapted, run_plainly
from test_teachers import teacher

from mimo.testing import Pool

LORA: Mapping[str, Any] = {"rank": 2, "targets": ["*"], "dropout": 0.2}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {},
    "full": {"plugin": "distributed", "shard": "full"},
    "gradients": {"plugin": "distributed", "shard": "gradients", "overlap_grad_reduce": True},
    "cpu-offload": {"plugin": "cpu-offload", "fraction": 0.5},
    "clipped": {"clip": 0.05, "clip_by": "module"},
    "lora": {"plugin": "distributed", "shard": "gradients"},
}
"""Keys of ``[optimizer]``; in the last one language model and generator learn by LoRA alone, and drop."""
LAYOUTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "lanes": {"vision": on(0, 1), "teacher": on(0, 1), "language": on(0, 3, pp=2), "drawer": on(2, 3)},
    "tensor": {
        "vision": on(3, 3),
        "teacher": on(0, 1, tp=2),
        "language": on(0, 3, pp=2, tp=2),
        "drawer": on(2, 3, tp=2),
    },
    "apart": {"vision": on(0, 0), "teacher": on(1, 1), "language": on(1, 2, pp=2), "drawer": on(3, 3)},
    "context": {"vision": on(0, 2), "teacher": on(2, 3), "language": on(0, 3, pp=2, cp=2), "drawer": on(0, 1, pp=2)},
}
"""Grids on four ranks."""
ORDINARY = {
    ("1f1b", "clipped", "context"),
    ("gpipe", "adamw", "apart"),
    ("interleaved", "cpu-offload", "lanes"),
    ("zb-h1", "lora", "tensor"),
    ("zb-h2", "gradients", "context"),
    ("zb-v", "full", "apart"),
    ("ahead", "full", "tensor"),
}
"""Each schedule, optimizer and layout; all others are for the soak."""


def joint(schedule: str, way: str, layout: str) -> Table:
    """Return settings of the whole graph in a layout."""
    lora = {"lora": LORA} if way == "lora" else {}
    drops = {"hidden_dropout": 0.1} if way == "lora" else {}
    grids = LAYOUTS[layout]
    modules = {
        "vision": dict(grids["vision"]),
        "teacher": {**teacher(0, 0, prefetch=True), **grids["teacher"]},
        "language": {**grids["language"], "loss_weight": 0.5, **lora},
        "drawer": {
            **grids["drawer"],
            "plugin": "flow",
            "fed_by": "language",
            "loss_weight": 0.7,
            "recompute": "full",
            **lora,
        },
    }
    modules["drawer"]["config"] = {**FLOW, "intermediate": 40, "drop_condition": 0.2}
    settings = table(modules, microbatches=4, weights="mixed", roles=ROLES, language=drops)
    settings["optimizer"] |= WAYS[way]
    return settings if schedule == "1f1b" else scheduled(settings, schedule)


@pytest.fixture(scope="module")
def adapted(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """What LoRA adds begins with numbers: at zero, half of its gradients would be."""
    return Oracle(pool, tmp_path_factory.mktemp("truths"), plain=run_plainly, layout=run_adapted)


@pytest.mark.parametrize(
    ("schedule", "way", "layout"),
    [
        pytest.param(*case, marks=() if case in ORDINARY else pytest.mark.soak)
        for case in itertools.product(SCHEDULES, WAYS, LAYOUTS)
    ],
)
def test_all_that_is_learned_at_once_equals_one_process(schedule: str, way: str, layout: str, adapted: Oracle) -> None:
    """Each term over its own count, every gradient, and weights, in any schedule and layout and by any optimizer."""
    settings = joint(schedule, way, layout)
    truth = adapted.truth(settings)
    assert list(truth.terms) == ["drawer.loss", "teacher.divergence"]
    assert all(min(means) > 0 for means in truth.terms.values())
    assert adapted.check(settings) == ""


@pytest.mark.soak
@pytest.mark.parametrize(
    "module", ["teacher", "language", *(pytest.param(one, marks=pytest.mark.soak) for one in ("vision", "drawer"))]
)
def test_each_module_alone_resumes_elsewhere(module: str, pool: Pool, tmp_path: Path) -> None:
    """A run is resumed with the grid of one module exchanged for another, and all others where they were."""
    first, second = joint("1f1b", "adamw", "lanes"), joint("1f1b", "adamw", "lanes")
    grid = {key: value for key, value in second["modules"][module].items() if key not in {"ranks", "pp", "tp", "cp"}}
    second["modules"][module] = {**grid, **LAYOUTS["tensor"][module]}
    for settings in (first, second):
        settings["run"] |= {"steps": 5, "directory": str(tmp_path)}
    check_going_on(pool, first, second, exactly=False)
