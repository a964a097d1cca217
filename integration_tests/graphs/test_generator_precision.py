"""Runs in bf16 and fp16 of a model that draws: losses by term and gradients near one process in fp32."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
from bounds import (
    BF16_MADE_GRADIENTS,
    BF16_MADE_TERMS,
    BF16_TAUGHT_TERMS,
    FP16_MADE_GRADIENTS,
    FP16_MADE_TERMS,
)
from oracle import Oracle, worst
from tables import Table, alone, table, world_of
from test_generator_grids import SP, drawing, on
from test_generators import JOINT, LENS
from test_precision import check_near, in_precision, run_steps

from mimo.testing import Pool

LAYOUTS: Mapping[str, Table] = {
    "with an encoder of its own": drawing(on(0, 1, tp=2), on(0, 2), lens=on(1, 2, config=LENS, feeds="drawer")),
    "pp2 to pp2 cp2": drawing(on(0, 1, pp=2), on(0, 3, pp=2, cp=2), microbatches=4),
    "tp2 sp to tp2 sp": drawing(on(0, 1, tp=2, **SP), on(1, 2, tp=2, recompute="full", **SP)),
    "all kinds of modules": table(
        JOINT, microbatches=2, weights="mixed", roles={"image": ("input", "output"), "glyph": ("output", "both")}
    ),
}
SCALE = 64.0
TERMS: Mapping[str, float] = {"bf16": BF16_MADE_TERMS, "fp16": FP16_MADE_TERMS}
GRADIENTS: Mapping[str, float] = {"bf16": BF16_MADE_GRADIENTS, "fp16": FP16_MADE_GRADIENTS}


@pytest.mark.parametrize(
    ("layout", "precision", "shard"),
    [
        ("with an encoder of its own", "bf16", "full"),
        ("pp2 to pp2 cp2", "fp16", "optimizer"),
        ("tp2 sp to tp2 sp", "bf16", "gradients"),
        ("all kinds of modules", "fp16", "full"),
    ],
)
def test_drawing_in_few_bits_is_near_fp32(layout: str, precision: str, shard: str, oracle: Oracle, pool: Pool) -> None:
    """Three steps and an evaluation, each part of the loss, and all gradients of the first step together."""
    settings = LAYOUTS[layout]
    scale = SCALE if precision == "fp16" else None
    reduced = in_precision(settings, precision, shard=shard, **({"loss_scale": scale} if scale else {}))
    (truth,) = pool.recall(1, run_steps, alone(settings))
    found = pool.run(world_of(settings), run_steps, reduced)
    check_near(found, truth)
    for ran in found:
        for step, wanted in zip(ran.steps, truth.steps, strict=True):
            assert step.losses.keys() == wanted.losses.keys()
            for name, loss in wanted.losses.items():
                bound = BF16_TAUGHT_TERMS if name.startswith("teacher.") else TERMS[precision]
                assert step.losses[name] == pytest.approx(loss, rel=bound), name
            assert step.loss_scale == scale
    whole, outcomes, squares = oracle.truth(settings), oracle.run(reduced), 0.0
    for name, gradient in whole.gradients.items():
        pieces = [one.gradients[name] for one in outcomes if name in one.gradients]
        errors = worst(pieces, gradient * (scale or 1.0))
        assert (errors >= 0).all(), name
        squares += float((errors**2).sum())
    assert math.sqrt(squares) <= GRADIENTS[precision] * whole.norms[0] * (scale or 1.0)
