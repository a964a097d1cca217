"""Cross-entropy and argmax over a vocabulary whose logits are split over tensor ranks, spans uneven or empty.

Shapes: T rows, V vocabulary, v this rank's span of it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from mimo.model.runtime._axis import TensorAxis


class _CrossEntropy(torch.autograd.Function):
    """``log(sum(exp(logits))) - logits[label]`` with the largest logit taken out first.

    All happens where the logits lie, of which a step has more than of anything else: exponentials, then gradients.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, start: int, axis: TensorAxis) -> Tensor:
        top = axis.largest(_row_maximum(logits))
        shares = logits.detach().float().sub_(top.unsqueeze(1))
        columns, here = _columns(labels, start, logits.shape[1])
        target = shares.gather(1, columns).masked_fill_(~here, 0.0).sum(1)
        shares = shares.exp_()
        sums, target = axis.total(torch.stack((shares.sum(1), target)))
        ctx.save_for_backward(shares, sums, columns, here)
        ctx.dtype = logits.dtype
        losses: Tensor = sums.log() - target
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        shares, sums, columns, here = ctx.saved_tensors
        each = gradients[0].unsqueeze(1)
        gradient = shares.mul_(each / sums.unsqueeze(1)).scatter_add_(1, columns, -each * here)
        return gradient.to(ctx.dtype), None, None, None


def _columns(labels: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the column of each label in a span, and whether it lies there, both [T, 1]; [T, 0] of an empty span."""
    columns = (labels - start).unsqueeze(1)[:, : min(width, 1)]
    here = (columns >= 0) & (columns < width)
    return columns.clamp(0, max(width - 1, 0)), here


def vocabulary_cross_entropy(logits: Tensor, labels: Tensor, *, vocabulary: int, axis: TensorAxis) -> Tensor:
    """Return the cross-entropy [T] of each row in fp32, the same on all tensor ranks.

    Args:
        logits: [T, v], this rank's span. In fp32 they are overwritten, and nothing else may read them afterwards.
        labels: [T] ids, each in ``0 .. vocabulary - 1``.
        vocabulary: V.
        axis: over which the vocabulary is cut.
    """
    start = axis.span(vocabulary).start
    return cast("Tensor", _CrossEntropy.apply(logits, labels, start, axis))  # type: ignore[no-untyped-call]  # torch leaves it untyped


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
    """Return the largest logit [T] of each row in fp32, minus infinity where the span is empty."""
    if logits.shape[1] == 0:
        return logits.new_full(logits.shape[:1], -torch.inf, dtype=torch.float32)
    return logits.amax(1).float()
