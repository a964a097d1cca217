"""How a parameter lies over tensor or expert ranks."""

from __future__ import annotations

import attrs
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from mimo.model.parallel.expert import ExpertAxis
from mimo.model.parallel.tensor import TensorAxis


@attrs.frozen
class Split:
    """How one parameter lies over tensor ranks, or that of a mixture of experts over the ranks that share them.

    Args:
        dim: tensor dimension that is cut as `torch.chunk` does (uneven and empty pieces are legal, nothing is
            padded); None for a copy on every rank.
        summed: each rank computes only a part of the copy's gradient, so it must be summed over tensor ranks.
        experts: dim 0 counts experts, of which each rank along ``ep`` holds equally many; ``dim`` is cut and gradients
            of copies are summed over ``etp``, and tensor ranks play no part.
    """

    dim: int | None = None
    summed: bool = False
    experts: bool = False

    def __attrs_post_init__(self) -> None:
        """Refuse what cannot be of experts."""
        assert not (self.experts and self.dim == 0), self

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The same for `DTensor`, on the one-dimensional tensor mesh, or on the expert mesh ``(ep, etp)``."""
        inner = Replicate() if self.dim is None else Shard(self.dim)
        return (Shard(0), inner) if self.experts else (inner,)

    def piece(self, full: Tensor, axis: TensorAxis | ExpertAxis) -> Tensor:
        """Return this rank's piece of ``full``, a view; ``axis`` is that of the experts where `experts` says so."""
        assert isinstance(axis, ExpertAxis) == self.experts, (self, axis)
        if isinstance(axis, ExpertAxis):
            held = axis.held(full.shape[0])
            full = full.narrow(0, held.start, len(held))
        if self.dim is None:
            return full
        span = axis.span(full.shape[self.dim])
        return full.narrow(self.dim, span.start, len(span))
