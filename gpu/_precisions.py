"""Fifty steps in bf16 or fp16 beside the same in fp32, on one device: losses, an evaluation, what is held in memory."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
from _case import Case, Found, alone, run
from jobs import make_job
from tables import Table, table
from test_oracle import on
from test_precision import Ran, in_precision, train

from mimo.launch import ProcessInfo
from mimo.trainer import Trainer

STEPS, TINY_STEPS = 50, 6
MEAN, WORST, EVALUATION = 0.01, 0.05, 0.02
LEARNT = 0.98
"""Of its first loss, which the mean of a run's last five must be below."""
_RATE = 3e-3
_SCALE = 64.0


def test(case: Case) -> Found:
    """Train both and compare."""
    precision, steps = case.options["precision"], TINY_STEPS if case.tiny else STEPS
    settings = table({"vision": on(0, 0), "language": on(0, 0)}, microbatches=2)
    settings["run"]["steps"] = steps
    settings["optimizer"]["lr"] = _RATE
    scale: dict[str, Any] = {"loss_scale": _SCALE} if precision == "fp16" else {}
    with alone(case) as process:
        single = _trained(case, settings, steps, process)
        half = _trained(case, in_precision(settings, precision, **scale), steps, process)
    return _compare(case, single, half)


def _trained(case: Case, settings: Table, steps: int, process: ProcessInfo) -> Ran:
    return train(Trainer(make_job(settings), rank=0, device=case.device, objects=process.objects), 1, steps)


def _compare(case: Case, single: Ran, half: Ran) -> Found:
    losses = [[step.loss for step in ran.steps] for ran in (single, half)]
    off = [abs(one / other - 1) for one, other in zip(losses[1], losses[0], strict=True)]
    mean, worst = sum(off) / len(off), max(off) if all(map(math.isfinite, off)) else math.inf
    evaluation = abs(half.evaluated / single.evaluated - 1)
    learnt = [sum(each[-5:]) / 5 / each[0] for each in losses]
    skipped = sum(step.skipped for step in half.steps)
    others = sorted(name for name, piece in half.held.items() if piece.values.dtype != np.float32)
    checks = {
        f"losses are off by {mean:.3g} on average, allowed {MEAN:g}": mean <= MEAN,
        f"a loss is off by {worst:.3g} of itself, allowed {WORST:g}": worst <= WORST,
        f"the held-out loss is off by {evaluation:.3g}, allowed {EVALUATION:g}": evaluation <= EVALUATION,
        f"{skipped} steps are skipped": skipped == 0,
        f"{len(others)} tensors are not kept in fp32, as {others[:1]}": not others,
        f"the last losses are {learnt} of the first": case.tiny or max(learnt) < LEARNT,
    }
    figures = {
        "losses apart, mean": mean,
        "losses apart, worst": worst,
        "held-out loss apart": evaluation,
        "last losses over the first": {"fp32": learnt[0], "reduced": learnt[1]},
        "seconds a step": {
            name: sum(step.seconds for step in ran.steps[1:]) / (len(ran.steps) - 1)
            for name, ran in (("fp32", single), ("reduced", half))
        },
        "steps": len(off),
        "skipped": skipped,
    }
    return Found(figures=figures, wrong=[line for line, holds in checks.items() if not holds])


if __name__ == "__main__":
    sys.exit(run(test, options={"precision": {"choices": ("bf16", "fp16"), "required": True}}))
