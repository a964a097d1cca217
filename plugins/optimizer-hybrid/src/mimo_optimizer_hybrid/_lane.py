"""Copies between device and host: at once on the CPU, on streams of their own beside an accelerator's computations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

import attrs
import torch
from torch import Tensor

from mimo_optimizer_hybrid._division import NUMBER_BYTES, travelling_bytes


@attrs.frozen
class Lane:
    """One direction of copies, which are done in the order in which they were given.

    Args:
        stream: None on the CPU, where each copy is done when `copy` returns.
    """

    stream: torch.Stream | None

    @classmethod
    def of(cls, device: torch.device) -> Self:
        """Return one to or from a device."""
        return cls(None if device.type == "cpu" else torch.Stream(device))

    def follow(self) -> None:
        """Let what is copied from here on come after all that the device has been given so far by this thread."""
        if self.stream is not None:
            self.stream.wait_stream(torch.accelerator.current_stream(self.stream.device))

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copy each source to its target, in host memory that is pinned on one side."""
        if self.stream is None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            return
        with self.stream:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)

    def keep(self, sources: Iterable[Tensor]) -> None:
        """Have memory of the device, freed meanwhile, not be given away before it has been copied."""
        if self.stream is not None:
            for source in sources:
                source.record_stream(self.stream)

    def mark(self) -> torch.Event | None:
        """Return an event that is reached when all copies so far are done; None if they are."""
        return None if self.stream is None else self.stream.record_event()


def bytes_of(buffer: Tensor) -> int:
    """Return the host memory that a `host_buffer` takes."""
    taken = buffer.untyped_storage().nbytes()
    return travelling_bytes(taken // NUMBER_BYTES, pins=buffer.is_pinned())


def host_buffer(numbers: int, device: torch.device, *, travels: bool = True) -> Tensor:
    """Return fp32 zeros in host memory, flat; pinned if they travel to or from an accelerator.

    Only copies of pinned memory run beside computations. What never leaves the host, as moments, is not pinned: the
    system could neither move nor swap it. They are written here, so that memory is taken now and not in the first step.
    """
    pinned = travels and device.type != "cpu"
    return torch.empty(numbers, dtype=torch.float32, device="cpu", pin_memory=pinned).zero_()
