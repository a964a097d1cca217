"""Cross-entropy and argmax over a vocabulary whose logits are split over tensor ranks, spans uneven or empty.

Shapes: T rows, V vocabulary, v this rank's span of it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from mimo.model.parallel import TensorAxis


class _CrossEntropy(torch.autograd.Function):
    """``log(sum(exp(logits))) - logits[label]`` with the largest logit taken out first.

    One buffer holds the exponentials, then the gradients: a step has more logits than of anything else.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, start: int, axis: TensorAxis, overwrites: bool) -> Tensor:  # noqa: FBT001 - autograd passes by position
        top = axis.largest(_row_maximum(logits)).unsqueeze(1)
        shares = _wide(logits.detach()).sub_(top) if overwrites else _wide(logits) - top
        columns, here = _columns(labels, start, logits.shape[1])
        target = shares.gather(1, columns).masked_fill_(~here, 0.0).sum(1)
        shares = shares.exp_()
        sums, target = axis.total(torch.stack((shares.sum(1), target)))
        ctx.save_for_backward(shares, sums, columns, here)
        ctx.dtype = logits.dtype
        losses: Tensor = sums.log() - target
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        shares, sums, columns, here = ctx.saved_tensors
        each = gradients[0].unsqueeze(1)
        gradient = shares.mul_(each / sums.unsqueeze(1)).scatter_add_(1, columns, -each * here)
        return gradient.to(ctx.dtype), None, None, None, None


def _columns(labels: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the column of each label in a span, and whether it lies there, both [T, 1]; [T, 0] of an empty span."""
    columns = (labels - start).unsqueeze(1)[:, : min(width, 1)]
    here = (columns >= 0) & (columns < width)
    return columns.clamp(0, max(width - 1, 0)), here


def vocabulary_cross_entropy(
    logits: Tensor, labels: Tensor, *, vocabulary: int, axis: TensorAxis, overwrites: bool = False
) -> Tensor:
    """Return the cross-entropy [T] of each row in fp32 at least, the same on all tensor ranks.

    One backward can go through it.

    Args:
        logits: [T, v], this rank's span.
        labels: [T] ids, each in ``0 .. vocabulary - 1``.
        vocabulary: V.
        axis: over which the vocabulary is cut.
        overwrites: computes where the logits lie, if they are in fp32; nobody else may then need them, nor a backward.
    """
    start = axis.span(vocabulary).start
    return cast("Tensor", _CrossEntropy.apply(logits, labels, start, axis, overwrites))  # type: ignore[no-untyped-call]  # torch leaves it untyped


def vocabulary_argmax(logits: Tensor, *, vocabulary: int, axis: TensorAxis) -> Tensor:
    """Return for each row the id [T] of the largest logit, of equal ones the lowest, the same on all tensor ranks."""
    span = axis.span(vocabulary)
    highest = _row_maximum(logits)
    top = axis.largest(highest)
    found = torch.full_like(highest, vocabulary - 1, dtype=torch.long)
    if span:
        found = torch.where(highest == top, logits.argmax(1) + span.start, found)
    return axis.smallest(found)


def _row_maximum(logits: Tensor) -> Tensor:
    """Return the largest logit [T] of each row in fp32 at least, minus infinity where the span is empty."""
    if logits.shape[1] == 0:
        return _wide(logits.new_full(logits.shape[:1], -torch.inf))
    return _wide(logits.amax(1))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
