"""How a parameter lies over tensor ranks, and the local tensor that layers compute with."""

from __future__ import annotations

import copy
from typing import Any, cast

import attrs
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from mimo.model.runtime._axis import TensorAxis


@attrs.frozen
class Split:
    """How one parameter lies over tensor ranks.

    Args:
        dim: tensor dimension that is cut as `torch.chunk` does (uneven and empty pieces are legal, nothing is
            padded); None for a copy on every rank.
        summed: each rank computes only a part of the copy's gradient, so it must be summed over tensor ranks.
    """

    dim: int | None = None
    summed: bool = False

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The same for `DTensor`, on the one-dimensional tensor mesh."""
        return (Replicate() if self.dim is None else Shard(self.dim),)

    def piece(self, full: Tensor, axis: TensorAxis) -> Tensor:
        """Return this rank's piece of ``full``, a view."""
        if self.dim is None:
            return full
        span = axis.span(full.shape[self.dim])
        return full.narrow(self.dim, span.start, len(span))


def distribute(full: Tensor, split: Split, *, axis: TensorAxis, mesh: DeviceMesh, like: Tensor) -> DTensor:
    """Cut ``full`` for this rank and return it as a DTensor of the full shape, with device and dtype of ``like``."""
    piece = split.piece(full, axis).to(like, copy=True, memory_format=torch.contiguous_format)
    return DTensor.from_local(
        piece, mesh, split.placements, run_check=False, shape=full.shape, stride=full.contiguous().stride()
    )


class _Local(torch.autograd.Function):
    """``DTensor.to_local`` at a third of its cost: the gradient's layout is the parameter's and isn't worked out."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.spec = parameter._spec  # noqa: SLF001 - from public parts, `DTensor.from_local`, it costs ten times as much
        piece = parameter.to_local()
        return piece.view_as(piece)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        # A copy: autograd may hand the same tensor to another parameter too (``(x + a) + b``), and would see by its
        # count of references that it is shared, were it not wrapped. Contiguous, as the spec says.
        piece, spec = gradients[0].clone(memory_format=torch.contiguous_format), copy.copy(ctx.spec)
        return DTensor(piece, spec, requires_grad=False)


def local(parameter: Tensor) -> Tensor:
    """Return the piece of a parameter that lies here, differentiably; a plain tensor is its own piece."""
    if not isinstance(parameter, DTensor):
        return parameter
    return cast("Tensor", _Local.apply(parameter))  # type: ignore[no-untyped-call]  # torch leaves it untyped
