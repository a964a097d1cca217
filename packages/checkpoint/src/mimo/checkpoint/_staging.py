"""Host memory that holds one step's data while it is written and training continues; reused by the next save."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from mimo.checkpoint._tensors import local_part, view_bytes
from mimo.checkpoint._writer import Layout, data_of


class Staging:
    """One buffer for each shard, as long as its data, every piece where the file will have it.

    Pinned where a tensor lies on a GPU, so that copies need no memory between and run beside each other. They run on
    the device's current stream: what another stream still writes to a tensor, that one must have waited for.
    """

    def __init__(self) -> None:
        self._layouts: Sequence[Layout] | None = None
        self._pinned = False
        self._buffers: dict[str, torch.Tensor] = {}
        self._targets: list[tuple[str, torch.Tensor]] = []

    def copy(self, layouts: Sequence[Layout], tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the pieces of ``layouts``, this rank's parts of ``tensors`` by name; returns when all are there.

        The buffers must not be in use. They are made anew only for other layouts than those before.
        """
        with torch.no_grad():
            names = [slot.cut.name for layout in layouts for slot in layout.slots]
            sources = {name: local_part(tensors[name]) for name in names}
            devices = {source.device for source in sources.values() if source.is_cuda}
            if layouts != self._layouts or self._pinned != bool(devices):
                self._make(layouts, pinned=bool(devices))
            for name, target in self._targets:
                source = sources[name]
                assert source.shape == target.shape, (name, source.shape, target.shape)
                assert source.dtype == target.dtype, (name, source.dtype, target.dtype)
                target.copy_(source, non_blocking=True)
            for device in devices:
                torch.cuda.current_stream(device).synchronize()

    def data(self, layout: Layout) -> Iterator[memoryview]:
        """Yield the bytes of a shard, which `copy` has put here."""
        yield view_bytes(self._buffers[layout.shard])

    def _make(self, layouts: Sequence[Layout], *, pinned: bool) -> None:
        self._layouts, self._buffers, self._targets = None, {}, []  # given back first: there may be no room for both
        for layout in layouts:
            buffer = torch.empty(layout.data_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
            self._buffers[layout.shard] = buffer
            self._targets += [
                (slot.cut.name, buffer[slot.begin : slot.end].view(slot.cut.dtype).view(slot.cut.box.shape))
                for slot in layout.slots
            ]
        self._layouts, self._pinned = layouts, pinned


def direct(tensors: Mapping[str, torch.Tensor]) -> Callable[[Layout], Iterator[memoryview]]:
    """Return the way to a shard's bytes without staging: each tensor is fetched when it is written."""
    return lambda layout: data_of(layout, lambda name: local_part(tensors[name]))
