"""Teachers in bf16: what they say and what is learned from it, against one plain process in fp32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from bounds import BF16_TAUGHT_GRADIENTS, BF16_TAUGHT_TERMS
from cases import Modules
from jobs import CPU, make_job
from oracle import Oracle, worst
from tables import Table, alone, table, world_of
from test_hidden_teachers import SP, on, teacher
from test_precision import in_precision

from mimo.testing import Pool
from mimo.trainer import Trainer

STUDENTS: Mapping[str, Mapping[str, Any]] = {
    "ids alone": {**on(0, 1, tp=2, **SP), "loss_weight": 0.0},
    "hidden rows alone": {**on(0, 1, pp=2), "loss_weight": 0.0},
    "both beside labels": on(1, 2, cp=2),
}
TEACHERS: Mapping[str, Modules] = {
    "ids alone": {"teacher": {**teacher(0, 1, top_k=5, tp=2, **SP), "distil": {"top_k": 5, "temperature": 2.0}}},
    "hidden rows alone": {"teacher": teacher(0, 1, tp=2, **SP), "tutor": teacher(1, 1, "cosine", prefetch=True)},
    "both beside labels": {"teacher": teacher(0, 1, "cosine", top_k=20)},
}


def _terms(rank: int, settings: Table) -> Mapping[str, float]:
    """Return what is learned from teachers in a step."""
    return Trainer(make_job(settings), rank=rank, device=CPU).train(1).losses


@pytest.mark.parametrize("case", TEACHERS)
def test_bf16_teachers_are_near_fp32(case: str, oracle: Oracle, pool: Pool) -> None:
    """Each part of the loss, and all gradients of the first step together."""
    settings = table({**TEACHERS[case], "language": STUDENTS[case]}, microbatches=2, weights="mixed")
    in_bf16 = in_precision(settings, "bf16", shard="full")
    ((wanted), *_) = pool.run(1, _terms, alone(settings))
    assert wanted
    for found in pool.run(world_of(settings), _terms, in_bf16):
        assert found == pytest.approx(wanted, rel=BF16_TAUGHT_TERMS)
    truth, outcomes = oracle.truth(settings), oracle.run(in_bf16)
    squares = 0.0
    for name, gradient in truth.gradients.items():
        errors = worst([one.gradients[name] for one in outcomes if name in one.gradients], gradient)
        assert (errors >= 0).all(), name
        squares += float((errors**2).sum())
    student = {**STUDENTS[case], "loss_weight": 1.0}
    by_labels = oracle.truth(table({"language": student}, microbatches=2, weights="mixed"))
    assert math.sqrt(squares) <= BF16_TAUGHT_GRADIENTS * max(truth.norms[0], by_labels.norms[0])
