"""The host's step of `HybridDeviceOptimizer` beside torch's fused kernel on one flat buffer, and the memory under both.

46 million numbers in one process and one thread, all of their state held by the host, gradients staged as they are when
a step begins. CPU seconds of the whole process, since the step runs on a thread of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch
from torch import nn

from mimo.optimizer import GRADIENT_SCALE
from mimo_optimizer_hybrid._lane import Lane
from mimo_optimizer_hybrid.optimizer import HybridDeviceOptimizer

COUNT, SIZE = 46, 2**20
STEPS = 5
"""Of each in a round, of which the fastest counts."""
STEP_BYTES, SUM_BYTES = 7 * 4, 3 * 4
"""Of each number: four read and three written by AdamW, two and one by a sum in place."""
SCALE = 0.999
"""What gradients are multiplied by, as `MimoOptimizer` divides them by labels and clips them."""

Ratios = Mapping[str, list[float]]
AIMS = {
    "CPU step of 46M numbers, fused AdamW on one buffer / ours": (">=", 0.9),
    "the same, gradients scaled in both": (">=", 0.9),
}


class Flat:
    """Parameters, gradients and moments in one buffer each, stepped by torch's kernel."""

    def __init__(self) -> None:
        self._buffers = [torch.randn(COUNT * SIZE).abs_() for _ in range(4)]
        self._count = torch.ones(())

    def step(self, scale: float) -> None:
        """Take one step."""
        parameter, gradient, average, square = self._buffers
        torch._fused_adamw_(  # what torch.optim calls
            [parameter],
            [gradient],
            [average],
            [square],
            [],
            [self._count],
            lr=1e-6,
            beta1=0.9,
            beta2=0.95,
            weight_decay=0.01,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
            grad_scale=None if scale == 1 else torch.full((), 1 / scale),
        )

    def add(self) -> None:
        """Add one buffer to another."""
        self._buffers[0].add_(self._buffers[1])


class Ours:
    """The same numbers in parameters of which the host holds all state."""

    def __init__(self) -> None:
        self._parameters = {str(index): nn.Parameter(torch.randn(SIZE)) for index in range(COUNT)}
        for parameter in self._parameters.values():
            parameter.grad = torch.randn(SIZE)
        self._optimizer = HybridDeviceOptimizer(self._parameters, lr=1e-6, staging_bytes=COUNT * SIZE * 8)

    def prepare(self, scale: float) -> None:
        """Stage the gradients."""
        for group in self._optimizer.param_groups:
            group[GRADIENT_SCALE] = scale
        self._optimizer.gradients_final(self._parameters)

    def step(self) -> None:
        """Take one step, new values back on the device included."""
        self._optimizer.step()


@contextmanager
def copies_left_out() -> Iterator[None]:
    """Leave out copies, which an accelerator makes beside the CPU."""
    with patch.object(Lane, "copy", lambda *_: None):
        yield


def measure(rounds: int) -> Ratios:
    """Return seconds of the kernel on one buffer over ours, and the speed of both over that of memory, a round each."""
    flat, ours = Flat(), Ours()
    found: dict[str, list[float]] = {}
    numbers = COUNT * SIZE
    for _ in range(rounds):
        best: dict[str, float] = {}
        for _ in range(STEPS):
            _keep(best, "sum", flat.add)
            for kind, scale in (("", 1.0), (", scaled", SCALE)):
                _keep(best, f"raw{kind}", partial(flat.step, scale))
                ours.prepare(scale)
                with copies_left_out():
                    _keep(best, f"ours{kind}", ours.step)
                ours.prepare(scale)
                _keep(best, f"with copies{kind}", ours.step)
        print(", ".join(f"{kind} {seconds * 1e3:.0f} ms" for kind, seconds in best.items()))
        memory = SUM_BYTES * numbers / best["sum"]
        for what, ratio in (
            (next(iter(AIMS)), best["raw"] / best["ours"]),
            (list(AIMS)[1], best["raw, scaled"] / best["ours, scaled"]),
            ("with new values copied as if to a device", best["raw"] / best["with copies"]),
            ("with both", best["raw, scaled"] / best["with copies, scaled"]),
            ("bytes a second of the kernel / of a sum in place", STEP_BYTES * numbers / best["raw"] / memory),
            ("bytes a second of ours / of a sum in place", STEP_BYTES * numbers / best["ours"] / memory),
        ):
            found.setdefault(what, []).append(ratio)
    return found


def _keep(best: dict[str, float], kind: str, work: Callable[[], None]) -> None:
    """Time something, and keep the least seconds of its kind."""
    began = time.process_time()
    work()
    best[kind] = min(time.process_time() - began, best.get(kind, float("inf")))
