"""The host's step of `HybridDeviceOptimizer` beside torch's fused kernel on one flat buffer, and the memory under both.

46 million numbers in one process, all of their state held by the host, gradients staged as they are when a step begins;
by one thread, and by one for each core. Beside them DeepSpeed's CPU Adam, if it is installed here, on as many
parameters, and the memory itself (`_bandwidth`). Seconds are of the clock: the step runs on threads of its own.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from _bandwidth import Bandwidth
from _found import Found
from torch import nn

from mimo.optimizer import GRADIENT_SCALE
from mimo_optimizer_hybrid._lane import Lane
from mimo_optimizer_hybrid.optimizer import HybridDeviceOptimizer

COUNT, SIZE = 46, 2**20
STEPS = 5
"""Of each in a round, of which the fastest counts."""
STEP_BYTES = 7 * 4
"""Of each number: four read and three written by AdamW."""
SCALE = 0.999
"""What gradients are multiplied by, as `MimoOptimizer` divides them by labels and clips them."""
AIM, WIDER_AIM = (">=", 0.95), (">=", 0.9)
"""Of one thread with gradients as they are, and of all else."""


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


class Ours:
    """The same numbers in parameters of which the host holds all state."""

    def __init__(self) -> None:
        self._parameters = make_parameters()
        self._optimizer = HybridDeviceOptimizer(self._parameters, lr=1e-6, staging_bytes=COUNT * SIZE * 8)

    def prepare(self, scale: float) -> None:
        """Stage the gradients."""
        for group in self._optimizer.param_groups:
            group[GRADIENT_SCALE] = scale
        self._optimizer.gradients_final(self._parameters)

    def step(self) -> None:
        """Take one step, new values back on the device included."""
        self._optimizer.step()


def make_parameters() -> dict[str, nn.Parameter]:
    """Return parameters with gradients."""
    parameters = {str(index): nn.Parameter(torch.randn(SIZE)) for index in range(COUNT)}
    for parameter in parameters.values():
        parameter.grad = torch.randn(SIZE)
    return parameters


def make_deepspeed() -> Any:
    """Return DeepSpeed's AdamW over as many numbers, compiled on first use.

    Raises:
        Exception: it is not installed, or can't be compiled.
    """
    adam = importlib.import_module("deepspeed.ops.adam")
    return adam.DeepSpeedCPUAdam(
        list(make_parameters().values()), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.01, adamw_mode=True
    )


@contextmanager
def copies_left_out() -> Iterator[None]:
    """Leave out copies, which an accelerator makes beside the CPU."""
    with patch.object(Lane, "copy", lambda *_: None):
        yield


def measure(rounds: int) -> Found:
    """Return seconds of the kernel on one buffer over ours, and the speed of both over that of memory, a round each."""
    ratios: dict[str, list[float]] = {}
    aims: dict[str, tuple[str, float]] = {}
    absent: dict[str, str] = {}
    memory = Bandwidth()
    for threads in dict.fromkeys((1, os.cpu_count() or 1)):
        torch.set_num_threads(threads)
        with_threads = "one thread" if threads == 1 else f"{threads} threads"
        what = f"CPU step of 46M numbers, {with_threads}"
        names = {
            "ours": f"{what}, fused AdamW on one buffer / ours",
            "ours, scaled": f"{what}, gradients scaled in both, fused AdamW on one buffer / ours",
        }
        aims |= dict.fromkeys(names.values(), WIDER_AIM)
        if threads == 1:
            aims[names["ours"]] = AIM
        flat, ours, theirs = Flat(), Ours(), None
        beside = f"{what}, DeepSpeed's CPU Adam / ours"
        try:
            theirs = make_deepspeed()
        except Exception as error:  # noqa: BLE001  # a compiler may fail in many ways
            absent[beside] = f"deepspeed: {type(error).__name__}: {error}"
        for _ in range(rounds):
            best: dict[str, float] = {}
            for _ in range(STEPS):
                for kind, scale in (("", 1.0), (", scaled", SCALE)):
                    _keep(best, f"raw{kind}", partial(flat.step, scale))
                    ours.prepare(scale)
                    with copies_left_out():
                        _keep(best, f"ours{kind}", ours.step)
                    ours.prepare(scale)
                    _keep(best, f"with copies{kind}", ours.step)
                if theirs is not None:
                    _keep(best, "DeepSpeed", theirs.step)
            speeds = memory.measure()
            print(f"{with_threads}: " + ", ".join(f"{kind} {seconds * 1e3:.1f} ms" for kind, seconds in best.items()))
            print("  memory: " + ", ".join(f"{loop} {speed / 1e9:.1f} GB/s" for loop, speed in speeds.items()))
            most = max(speeds.values())
            found = {
                names["ours"]: best["raw"] / best["ours"],
                names["ours, scaled"]: best["raw, scaled"] / best["ours, scaled"],
                f"{what}, with new values copied as if to a device": best["raw"] / best["with copies"],
                f"{what}, with both": best["raw, scaled"] / best["with copies, scaled"],
                f"bytes a second of fused AdamW / of memory, {with_threads}": _speed(best["raw"]) / most,
                f"bytes a second of ours / of memory, {with_threads}": _speed(best["ours"]) / most,
            }
            if theirs is not None:
                found[beside] = best["DeepSpeed"] / best["ours"]
            for name, ratio in found.items():
                ratios.setdefault(name, []).append(ratio)
    torch.set_num_threads(1)
    return Found(ratios=ratios, aims=aims, absent=absent)


def _speed(seconds: float) -> float:
    """Return the bytes a second of a step."""
    return STEP_BYTES * COUNT * SIZE / seconds


def _keep(best: dict[str, float], kind: str, work: Callable[[], object]) -> None:
    """Time something, and keep the least seconds of its kind."""
    began = time.perf_counter()
    work()
    best[kind] = min(time.perf_counter() - began, best.get(kind, float("inf")))
