"""When actions of a step were done: by the host's clock, or by that of the device which computes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

import attrs
import torch

Reading: TypeAlias = Any
"""What a timer has taken down; its time may be known only later."""


class Timer(Protocol):
    """Takes moments down while a rank works, and gives their times once it is done."""

    def now(self) -> Reading:
        """Take down this moment; nothing is waited for."""

    def seconds(self, readings: Sequence[Reading]) -> list[float]:
        """Return the times of moments by `time.perf_counter`; waits until the last of them is over."""


@attrs.frozen
class HostTimer:
    """The clock of this process."""

    def now(self) -> float:
        """Return the time."""
        return time.perf_counter()

    def seconds(self, readings: Sequence[float]) -> list[float]:
        """Return what they are."""
        return list(readings)


class DeviceTimer:
    """The clock of an accelerator: a moment is when the device comes to it, however far the host has run ahead.

    Each is an event on the device's current stream. The first makes the host wait for the device once, so that both
    clocks can be compared while the device has nothing to do.

    Args:
        device: where this rank computes.
        event: makes an event that takes its time; None: `torch.Event`.
        synchronize: waits for the device; None: `torch.accelerator.synchronize`.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        event: Callable[[], Any] | None = None,
        synchronize: Callable[[], object] | None = None,
    ) -> None:
        self._event = event or partial(torch.Event, device, enable_timing=True)
        self._synchronize = synchronize or partial(torch.accelerator.synchronize, device)
        self._first: Any = None
        self._began = 0.0

    def now(self) -> Reading:
        """Return an event that the device will come to."""
        if self._first is None:
            self._synchronize()
            self._first = self._event()
            self._began = time.perf_counter()
            self._first.record()  # a device without work comes to it at once
        reading = self._event()
        reading.record()
        return reading

    def seconds(self, readings: Sequence[Reading]) -> list[float]:
        """Wait for the device, and return when it came to them."""
        self._synchronize()
        milliseconds = (self._first.elapsed_time(reading) for reading in readings)
        return [self._began + elapsed / 1e3 for elapsed in milliseconds]


def timer_of(device: torch.device) -> Timer:
    """Return what times the work of a device."""
    return HostTimer() if device.type == "cpu" else DeviceTimer(device)
