"""Fifty steps in bf16, fp16 or TF32 beside the same in fp32, on one device: losses, an evaluation, what is held."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
import torch
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
ROUNDED = 1e-5
"""By how much of itself a product in fp32 is off at most; with TF32, which reads 10 bits of a fraction, by more."""
_RATE = 3e-3
_OWN: Mapping[str, Mapping[str, Any]] = MappingProxyType({"fp16": {"loss_scale": 64.0}, "tf32": {"tf32": True}})


def test(case: Case) -> Found:
    """Train both and compare."""
    precision, steps = case.options["precision"], TINY_STEPS if case.tiny else STEPS
    settings = table({"vision": on(0, 0), "language": on(0, 0)}, microbatches=2)
    settings["run"]["steps"] = steps
    settings["optimizer"]["lr"] = _RATE
    reduced = in_precision(settings, "fp32" if precision == "tf32" else precision, **_OWN.get(precision, {}))
    with alone(case) as process:
        single, off = _trained(case, settings, steps, process), product_error(case)
        half, off_reduced = _trained(case, reduced, steps, process), product_error(case)
    found = _compare(case, single, half)
    if precision != "tf32":
        return found
    products = {"fp32": off, "TF32": off_reduced}
    return attrs.evolve(
        found,
        figures={**found.figures, "products apart from float64": products},
        wrong=[*found.wrong, *odd_products(case, **products)],
    )


def product_error(case: Case) -> float:
    """Return by how much of itself a product in fp32 is off that of float64, as torch multiplies just now."""
    draw = torch.Generator().manual_seed(0)
    one, other = (torch.randn(256, 256, generator=draw).to(case.device) for _ in range(2))
    exact = one.double() @ other.double()
    return float(((one @ other).double() - exact).norm() / exact.norm())


def odd_products(case: Case, **off: float) -> list[str]:
    """Return which products round and should not, or don't and should: on CPUs none does."""
    rounds = {name: name == "TF32" and case.is_cuda for name in off}
    return [
        f"products in {name} are off by {share:.3g} of themselves, expected {'more' if rounds[name] else 'less'} than "
        f"{ROUNDED:g}"
        for name, share in off.items()
        if (share > ROUNDED) != rounds[name]
    ]


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
    sys.exit(run(test, options={"precision": {"choices": ("bf16", "fp16", "tf32"), "required": True}}))
