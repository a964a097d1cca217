"""What a GPU does while something runs: its kernels and copies, as PyTorch's profiler has seen them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import attrs
import torch
from _case import Case
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # public, but torch's own types don't say so
from torch.profiler import ProfilerActivity, profile

Span: TypeAlias = tuple[float, float]
"""Seconds, from and to."""
_COPY, _WITHIN, _SET = "Memcpy", "DtoD", "Memset"


@attrs.frozen
class DeviceEvent:
    """A kernel, a copy, or memory that is set: its name, and the seconds at which it began and ended."""

    name: str
    begin: float
    end: float

    @property
    def is_copy(self) -> bool:
        """Whether it copies between host and device."""
        return self.name.startswith(_COPY) and _WITHIN not in self.name

    @property
    def is_kernel(self) -> bool:
        """Whether it computes."""
        return not self.name.startswith((_COPY, _SET))


def trace(case: Case, work: Callable[[], object]) -> Sequence[DeviceEvent]:
    """Return what the device does while something runs, until all of it is done; nothing on the CPU."""
    if not case.is_cuda:
        work()
        return ()
    torch.cuda.synchronize(case.device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize(case.device)
    return [
        DeviceEvent(event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profiler.events() or ()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]


def launches(events: Iterable[DeviceEvent]) -> int:
    """Return how many kernels ran."""
    return sum(event.is_kernel for event in events)


def idle_share(events: Sequence[DeviceEvent]) -> float:
    """Return in which share of the time, from the first event to the end of the last, no kernel ran; 1 without any."""
    if not events:
        return 1.0
    begin, end = min(event.begin for event in events), max(event.end for event in events)
    return 1 - _length(_merged(_spans(events, copies=False))) / (end - begin)


def hidden_share(events: Sequence[DeviceEvent]) -> float:
    """Return in which share of the time of copies between host and device a kernel ran; 0 without copies."""
    copies, kernels = (_merged(_spans(events, copies=copies)) for copies in (True, False))
    both = [(max(a, c), min(b, d)) for a, b in copies for c, d in _near(kernels, a, b)]
    return _length(both) / _length(copies) if copies else 0.0


def copied_seconds(events: Sequence[DeviceEvent]) -> float:
    """Return in how many seconds something was copied between host and device."""
    return _length(_merged(_spans(events, copies=True)))


def _spans(events: Iterable[DeviceEvent], *, copies: bool) -> list[Span]:
    return [(event.begin, event.end) for event in events if (event.is_copy if copies else event.is_kernel)]


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Return spans of which none overlaps another, ascending."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def _near(spans: Sequence[Span], begin: float, end: float) -> list[Span]:
    return [span for span in spans if span[0] < end and begin < span[1]]


def _length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)
