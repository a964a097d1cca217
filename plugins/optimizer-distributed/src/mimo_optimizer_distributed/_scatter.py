"""A sum over lanes of which each keeps its piece, that begins at once and is waited for later."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mimo.topology.collectives import reduce_scatter_single


def _exchanges(gradient: Tensor) -> bool:
    """Return whether lanes send pieces to each other instead of calling the backend's reduce-scatter."""
    return gradient.device.type == "cpu"


class Scatter:
    """Gradients that are being summed over lanes, in one message. Each is cut along dim 0, as `torch.chunk` does it.

    gloo's own reduce-scatter can't be asked whether it is done, and sends twice as much as it must, so that lanes on
    the CPU exchange pieces and each adds up what it gets, in the order of the lanes.

    Args:
        group: the lanes.
        gradients: whole ones of one dtype, the same on each lane but for their values.
    """

    def __init__(self, group: dist.ProcessGroup, gradients: Sequence[Tensor]) -> None:
        lanes, first = group.size(), gradients[0]
        self._lanes = lanes
        self._shapes = [(-(-len(gradient) // lanes), *gradient.shape[1:]) for gradient in gradients]
        self._sizes = [torch.Size(shape).numel() for shape in self._shapes]
        self._sent = first.new_empty(lanes, sum(self._sizes))
        torch._chunk_cat(list(gradients), dim=0, num_chunks=lanes, out=self._sent)  # noqa: SLF001 - as FSDP2 does
        self._exchanges = _exchanges(first)
        self._got = torch.empty_like(self._sent if self._exchanges else self._sent[0])
        if self._exchanges:
            work = dist.all_to_all_single(self._got, self._sent, group=group, async_op=True)
        else:
            work = reduce_scatter_single(self._got, self._sent, group, async_op=True)
        assert work is not None
        self._work = work

    @property
    def is_done(self) -> bool:
        """Whether `end` would not wait."""
        return bool(self._work.is_completed())

    def end(self) -> list[Tensor]:
        """Wait, and return this lane's piece of each sum, padded to the length of the first lane's."""
        self._work.wait()
        flat = self._got.sum(0) if self._exchanges else self._got
        return [piece.view(shape) for piece, shape in zip(torch.split(flat, self._sizes), self._shapes, strict=True)]
