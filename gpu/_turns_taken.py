"""Seconds of several ways to do the same, which take turns: the device's own where it has a clock, else the host's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import attrs
import torch
from _case import Case

Way: TypeAlias = Callable[[], Callable[[], object]]
"""Does a forward, and returns what does its backward."""
_SIDE = 8192
"""Of a product of matrices, which keeps a GPU busy until the host has sent all that is timed."""


@attrs.frozen
class Took:
    """Seconds of one forward and one backward."""

    forward: float
    backward: float


def take_turns(case: Case, ways: Mapping[str, Way], *, rounds: int, repeats: int = 5) -> Mapping[str, Sequence[Took]]:
    """Return what each way took in each round but the first, which chooses kernels and takes memory.

    Args:
        case: where.
        ways: by name.
        rounds: that count.
        repeats: of each in a round, one after the other.
    """
    found: dict[str, list[Took]] = {name: [] for name in ways}
    busy = torch.ones(_SIDE, _SIDE, device=case.device) if case.is_cuda else None
    for turn in range(rounds + 1):
        for name, way in ways.items():
            took = _on_device(way, busy, repeats) if busy is not None else _on_host(way, repeats)
            if turn:
                found[name].append(took)
    return found


def _on_device(way: Way, busy: torch.Tensor, repeats: int) -> Took:
    begun, between, ended = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    busy @ busy
    begun.record()
    backwards = [way() for _ in range(repeats)]
    between.record()
    for backward in backwards:
        backward()
    ended.record()
    torch.cuda.synchronize()
    return Took(begun.elapsed_time(between) / repeats / 1e3, between.elapsed_time(ended) / repeats / 1e3)


def _on_host(way: Way, repeats: int) -> Took:
    begun = time.perf_counter()
    backwards = [way() for _ in range(repeats)]
    between = time.perf_counter()
    for backward in backwards:
        backward()
    return Took((between - begun) / repeats, (time.perf_counter() - between) / repeats)


def ratio(one: Sequence[Took], other: Sequence[Took]) -> Took:
    """Return how many times as long one way takes as another: the median of the ratios of rounds."""
    return Took(
        statistics.median(a.forward / b.forward for a, b in zip(one, other, strict=True)),
        statistics.median(a.backward / b.backward for a, b in zip(one, other, strict=True)),
    )


def medians(took: Sequence[Took]) -> dict[str, float]:
    """Return the median seconds of both parts."""
    return {
        "forward": statistics.median(one.forward for one in took),
        "backward": statistics.median(one.backward for one in took),
    }


def in_a_row(case: Case, work: Callable[[], object], *, rounds: int, repeats: int) -> float:
    """Return the median seconds of something that is repeated without waiting, host and device together."""
    found = []
    for turn in range(rounds + 1):
        synchronise(case)
        begun = time.perf_counter()
        for _ in range(repeats):
            work()
        synchronise(case)
        if turn:
            found.append((time.perf_counter() - begun) / repeats)
    return statistics.median(found)


def synchronise(case: Case) -> None:
    """Wait for the device."""
    if case.is_cuda:
        torch.cuda.synchronize(case.device)
