"""Each model family on the device beside a plain loop on the CPU: loss, every gradient, weights after three steps.

In float32 it is our `Trainer` that trains, in the bounds of the first law. In float64, which no setting offers, the
plain loop itself runs on both: there rounding hides nothing that the device's kernels do otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from _case import Case, Found, alone, noting, run
from _compare import DOUBLE, LAW, RelativeDifference, missed, relative_difference
from _models import GROUPS, models
from jobs import CPU, prepare
from oracle import Oracle, run_layout
from tables import Table
from tables import alone as on_one_rank
from torch import Tensor
from truth import Truth, run_plain

from mimo.launch import ProcessInfo
from mimo.model.language import rotary
from mimo.testing import Pool


@contextmanager
def same_angles() -> Iterator[None]:
    """Have rotary positions turn by the same angles everywhere, in float64: in float32 their rates differ by device."""
    rates = rotary.pair_rates

    def widened(config: Any, device: torch.device) -> Tensor:
        return rates(config, CPU).double().to(device)

    with mock.patch.object(rotary, "pair_rates", widened):
        yield


def run_double(rank: int, settings: Table, device: torch.device = CPU) -> Truth:
    """Train by the plain loop in float64."""
    with same_angles():
        return run_plain(rank, settings, device=device, dtype=torch.float64)


def test(case: Case) -> Found:
    """Compare all families of a group."""
    compare = _in_double if case.options["dtype"] == "fp64" else _in_single
    found: dict[str, RelativeDifference] = {}
    wrong: list[str] = []
    with noting("the group of one rank", wrong), Pool(prepare, case.folder) as pool, alone(case) as process:
        # in this order, as a pool forks before anything is computed
        for name, settings in models(case.options["group"], tiny=case.tiny).items():
            with noting(name, wrong):
                found[name] = compare(case, settings, pool, process)
    figures = {name: {**each.figures(), "at most": 1} for name, each in found.items()}
    return Found(
        figures=figures, wrong=[*wrong, *(line for name, each in found.items() for line in missed(name, each))]
    )


def _in_single(case: Case, settings: Table, pool: Pool, process: ProcessInfo) -> RelativeDifference:
    oracle = Oracle(pool, case.folder)
    clear = oracle.clear(settings)
    truth, outcome = oracle.truth(clear), run_layout(0, clear, device=case.device, objects=process.objects)
    found = relative_difference(truth, [outcome], bounds=LAW)
    if found.worst <= 1:
        return found
    (nudged,) = pool.run(1, partial(run_plain, nudged=True), on_one_rank(clear))
    return relative_difference(truth, [outcome], bounds=LAW, nudged=nudged)


def _in_double(case: Case, settings: Table, pool: Pool, _process: ProcessInfo) -> RelativeDifference:
    plain = on_one_rank(settings)
    (truth,) = pool.run(1, run_double, plain)
    return relative_difference(truth, run_double(0, plain, case.device), bounds=DOUBLE)


if __name__ == "__main__":
    own = {
        "group": {"choices": tuple(GROUPS), "required": True},
        "dtype": {"choices": ("fp32", "fp64"), "required": True},
    }
    sys.exit(run(test, options=own))
