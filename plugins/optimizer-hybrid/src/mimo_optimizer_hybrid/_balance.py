"""How much of the state the host should hold for both halves to take equally long: measured, on memory of its own."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from mimo.optimizer.runtime import fused_adamw
from mimo_optimizer_hybrid._lane import host_buffer
from mimo_optimizer_hybrid._tensors import Settings
from mimo_optimizer_hybrid._threads import host_thread

_NUMBERS = 2**22
_RUNS = 3
_SETTINGS = Settings(lr=0.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, scale=1.0)


def balanced_fraction(device: torch.device, numbers: int, *, threads: int) -> float:
    """Return the share of the host at which its step, copies included, takes as long as the device's.

    Args:
        device: of the parameters.
        numbers: of all parameters; no more than these are tried.
        threads: on which the host steps.
    """
    count = max(min(numbers, _NUMBERS), 1)
    here = host_buffer(4 * count, device).chunk(4)
    there = torch.zeros(4 * count, device=device).chunk(4)

    def copy() -> None:
        here[1].copy_(there[1], non_blocking=True)
        there[0].copy_(here[0], non_blocking=True)

    with host_thread(threads) as thread:
        stepped = thread.submit(_seconds, lambda: _step(here), device).result()
    copies = _seconds(copy, device)
    host = stepped + copies if device.type == "cpu" else max(stepped, copies)
    own = _seconds(lambda: _step(there), device)
    return own / (own + host)


def _step(tensors: tuple[torch.Tensor, ...]) -> None:
    parameter, gradient, average, square = tensors
    count = torch.ones((), device=parameter.device)
    fused_adamw([parameter], [gradient], [average], [square], [count], _SETTINGS.group)


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    """Return how long something takes at its best, after a first time."""
    found = []
    for _ in range(1 + _RUNS):
        began = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        found.append(time.perf_counter() - began)
    return min(found[1:])
