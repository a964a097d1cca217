"""Items on their way to an accelerator: all that a rank decodes for a step in one copy, beside what is computed.

The thread that decodes the last item of a step writes all of them into one buffer in pinned host memory, and has that
copied on a stream of its own. The stream that computes waits for the copy before the first item is read. A step of
which an item is needed before all are decoded isn't copied as a whole: each of its items is moved when it is needed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import attrs
import torch
from torch import Tensor

from mimo.trainer.items.packing import describe, packed_bytes, read_items, write_items
from mimo.trainer.items.prepared import Item, Prepare

_PINNED_SHARE = 4
"""One part in so many of the bytes that a rank may hold ahead is for the pinned buffer."""


class Copier(Protocol):
    """How bytes come to a device beside what it computes; in any thread, but `receive` in the one that computes."""

    def begin_thread(self) -> None:
        """Have the device for this thread's own, before it does anything else of these."""

    def pinned(self, count: int) -> Tensor:
        """Return so many bytes of host memory from which copies run beside computations."""

    def send(self, source: Tensor) -> tuple[Tensor, torch.Event]:
        """Begin to copy bytes, and return where they will be, and what is reached when they are there."""

    def receive(self, sent: Tensor, event: torch.Event) -> None:
        """Have what is computed from here on come after a copy, whose memory it may use until it has ended."""


@attrs.frozen
class StreamCopier:
    """Copies on a stream of its own.

    Args:
        device: where to.
        stream: of that device.
    """

    device: torch.device
    stream: torch.Stream

    def begin_thread(self) -> None:
        """Leave the first device, which a thread begins with: all ranks would take memory there."""
        torch.cuda.set_device(self.stream.device)

    def pinned(self, count: int) -> Tensor:
        """Return page-locked memory."""
        with self.stream:
            return torch.empty(count, dtype=torch.uint8, device="cpu", pin_memory=True)

    def send(self, source: Tensor) -> tuple[Tensor, torch.Event]:
        """Copy into memory that the stream of the copies owns: no computation of before can still use it."""
        with self.stream:  # that of this thread alone
            sent = torch.empty(len(source), dtype=torch.uint8, device=self.device)
            sent.copy_(source, non_blocking=True)
            return sent, self.stream.record_event()

    def receive(self, sent: Tensor, event: torch.Event) -> None:
        """Let the stream that computes wait, not the host; and the memory not be given away while it computes."""
        current = torch.accelerator.current_stream(self.device)
        event.wait(current)
        sent.record_stream(current)


class Staging:
    """The pinned buffer of a rank, which steps use one after the other.

    Args:
        copier: of the device.
        max_bytes: of the buffer; a step with more isn't copied as a whole.
    """

    def __init__(self, copier: Copier, *, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._copier = copier
        self._lock = threading.Lock()
        self._buffer: Tensor | None = None
        self._event: torch.Event | None = None

    @classmethod
    def to(cls, device: torch.device, *, ahead_bytes: int) -> Staging | None:
        """Return what sends items to a device; None for the CPU, where they are used where they lie.

        Args:
            device: of this rank.
            ahead_bytes: that the rank may hold ahead, the buffer among them.
        """
        if device.type == "cpu":
            return None
        return cls(StreamCopier(device, torch.Stream(device)), max_bytes=ahead_bytes // _PINNED_SHARE)

    def begin_thread(self) -> None:
        """Prepare a new thread for `send`."""
        self._copier.begin_thread()

    def send(self, items: Sequence[Item]) -> SentItems | None:
        """Begin to copy items, and return them as they will lie on the device; None if there is no room for them."""
        described = [describe(item) for item in items]
        size = packed_bytes(described)
        if size > self.max_bytes:
            return None
        with self._lock:
            if self._event is not None:
                self._event.synchronize()  # until then the copy before reads the buffer
            if self._buffer is None or len(self._buffer) < size:
                self._buffer = None  # let go before there is another
                self._buffer = self._copier.pinned(min(2 * size, self.max_bytes))
            write_items(self._buffer, items)
            sent, self._event = self._copier.send(self._buffer[:size])
            return SentItems(copier=self._copier, sent=sent, event=self._event, items=read_items(sent, described))


@attrs.define(kw_only=True, eq=False)
class SentItems:
    """Items that lie on the device once the event is reached; `take` is for the thread that computes."""

    copier: Copier
    sent: Tensor
    event: torch.Event
    items: list[Item]
    is_received: bool = False

    def take(self, number: int) -> Item:
        """Return one of them, to be used by what is computed from here on."""
        if not self.is_received:
            self.copier.receive(self.sent, self.event)
            self.is_received = True
        return self.items[number]


class StagedStep:
    """The items of one step that a rank decodes.

    Args:
        staging: sends them when all are decoded, unless one has been needed before.
    """

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._lock = threading.Lock()
        self._left = 1  # that of `all_known`
        self._is_whole = True
        self._items: list[StagedItem] = []

    @property
    def is_busy(self) -> bool:
        """Whether a thread writes its items into the pinned buffer."""
        return self._lock.locked()

    def expect(self) -> None:
        """Count an item that will be prepared."""
        with self._lock:
            self._left += 1

    def all_known(self) -> None:
        """Say that no more will be expected."""
        self._count_down()

    def prepare(self, prepare: Prepare) -> StagedItem:
        """Prepare an item that was expected; the last one has all of them sent."""
        found: StagedItem | None = None
        try:
            found = StagedItem(step=self, host=prepare())
            return found
        finally:
            self._count_down(found)

    def take(self, item: StagedItem) -> Item:
        """Return an item where it lies; from then on those that are not sent are not sent together."""
        with self._lock:
            if item.sent is None:
                self._is_whole = False
                self._items = []
                assert item.host is not None
                return item.host
        return item.sent.take(item.number)

    def _count_down(self, item: StagedItem | None = None) -> None:
        with self._lock:
            if item is not None and self._is_whole:
                self._items.append(item)
            self._left -= 1
            if self._left or not self._is_whole or not self._items:
                return
            items, self._items = self._items, []
            sent = self._staging.send([each.host for each in items if each.host is not None])
            for number, each in enumerate(items) if sent is not None else ():
                each.number, each.sent, each.host = number, sent, None


@attrs.define(kw_only=True, eq=False)
class StagedItem:
    """One item of a step: in host memory until it is sent.

    Args:
        step: whose it is.
        host: as it was prepared.
        sent: all that were sent with it.
        number: its place among them.
    """

    step: StagedStep
    host: Item | None
    sent: SentItems | None = None
    number: int = 0
    bytes: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Note its bytes, which it takes on the host or on the device."""
        self.bytes = sum(tensor.nbytes for tensor in self.host.values()) if self.host is not None else 0

    def take(self) -> Item:
        """Return its tensors, on the device if they have been sent there."""
        return self.step.take(self)
