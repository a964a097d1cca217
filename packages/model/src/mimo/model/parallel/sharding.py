"""How a parameter lies over tensor or expert ranks, and the local tensor that layers compute with."""

from __future__ import annotations

import copy
from typing import Any, cast

import attrs
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
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


def distribute(full: Tensor, split: Split, *, axis: TensorAxis | ExpertAxis, mesh: DeviceMesh, like: Tensor) -> DTensor:
    """Cut ``full`` for this rank and return it as a DTensor of the full shape, with device and dtype of ``like``.

    ``axis`` and ``mesh`` are those of the tensor ranks, or of the experts where ``split`` says so.
    """
    piece = split.piece(full, axis).to(like, copy=True, memory_format=torch.contiguous_format)
    return DTensor.from_local(
        piece, mesh, split.placements, run_check=False, shape=full.shape, stride=full.contiguous().stride()
    )


class _Local(torch.autograd.Function):
    """``DTensor.to_local`` at a third of its cost: the gradient's layout is the parameter's and isn't worked out."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, fresh: bool) -> Tensor:  # noqa: FBT001 - autograd passes by position
        ctx.fresh = fresh
        ctx.spec = parameter._spec  # noqa: SLF001 - from public parts, `DTensor.from_local`, it costs ten times as much
        piece = parameter.to_local()
        return piece.view_as(piece)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # A copy: autograd may hand the same tensor to another parameter too (``(x + a) + b``), and would see by its
        # count of references that it is shared, were it not wrapped. Contiguous, as the spec says.
        piece = gradients[0].contiguous() if ctx.fresh else gradients[0].clone(memory_format=torch.contiguous_format)
        return DTensor(piece, copy.copy(ctx.spec), requires_grad=False), None


def local(parameter: Tensor, *, fresh: bool = False) -> Tensor:
    """Return the piece of a parameter that lies here, differentiably; a plain tensor is its own piece.

    Args:
        parameter: a parameter.
        fresh: the piece is read once, by an operation that makes a new tensor for its gradient, as a matrix product
            does and an addition does not; the gradient is then taken without a copy.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    if not torch.is_grad_enabled():
        return held(parameter)
    return cast("Tensor", _Local.apply(parameter, fresh))  # type: ignore[no-untyped-call]  # torch leaves it untyped


def held(tensor: Tensor) -> Tensor:
    """Return the piece of a parameter, or of its gradient, that lies here, without a graph; not a copy."""
    # `to_local` would enter it into the graph, and under `no_grad` costs as much as a small product.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()  # noqa: SLF001


def as_gradient(parameter: Tensor, piece: Tensor, part: slice | None = None) -> Tensor:
    """Return a gradient of this rank's piece as ``parameter.grad`` must be.

    Args:
        parameter: whose.
        piece: contiguous, and nobody else's.
        part: which of the piece's first dim it is of, None for all; it is zero elsewhere.
    """
    if part is not None:
        whole = torch.zeros_like(held(parameter))
        whole[part] = piece
        piece = whole
    if not isinstance(parameter, DTensor):
        return piece
    return DTensor(piece, copy.copy(parameter._spec), requires_grad=False)  # noqa: SLF001 - see `_Local`
