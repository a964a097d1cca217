"""The oracle over a model that reads, is taught and draws: text, pictures, a teacher and a flow in one graph."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
from oracle import Oracle
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
ORDINARY = {("ahead", "full"), ("interleaved", "cpu-offload"), ("zb-h1", "lora")}
"""The others are for the soak."""


def joint(schedule: str, way: str) -> Table:
    """Return settings of the whole graph on four ranks, in two lanes of each module."""
    lora = {"lora": LORA} if way == "lora" else {}
    drops = {"hidden_dropout": 0.1} if way == "lora" else {}
    modules = {
        "vision": on(0, 1),
        "teacher": teacher(0, 1, prefetch=True),
        "language": on(0, 3, pp=2, loss_weight=0.5, **lora),
        "drawer": on(2, 3, plugin="flow", fed_by="language", loss_weight=0.7, recompute="full", **lora),
    }
    modules["drawer"]["config"] = {**FLOW, "intermediate": 40, "drop_condition": 0.2}
    settings = table(modules, microbatches=4, weights="mixed", roles=ROLES, language=drops)
    settings["optimizer"] |= WAYS[way]
    return settings if schedule == "1f1b" else scheduled(settings, schedule)


@pytest.fixture(scope="module")
def adapted(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """What LoRA adds begins with numbers: at zero, half of its gradients would be."""
    return Oracle(pool, tmp_path_factory.mktemp("truths"), plain=run_plainly, layout=run_adapted)


@pytest.mark.each("schedule")
@pytest.mark.parametrize(
    ("schedule", "way"),
    [
        pytest.param(*case, marks=() if case in ORDINARY else pytest.mark.soak)
        for case in itertools.product(SCHEDULES, WAYS)
    ],
)
def test_all_that_is_learned_at_once_equals_one_process(schedule: str, way: str, adapted: Oracle) -> None:
    """Each term over its own count, every gradient, and weights, in any schedule and by any optimizer."""
    settings = joint(schedule, way)
    truth = adapted.truth(settings)
    assert list(truth.terms) == ["drawer.loss", "teacher.divergence"]
    assert all(min(means) > 0 for means in truth.terms.values())
    assert adapted.check(settings) == ""
