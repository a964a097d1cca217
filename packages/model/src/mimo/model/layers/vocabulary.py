"""Cross-entropy and argmax over a vocabulary whose logits are split over tensor ranks, spans uneven or empty.

Shapes: T rows, V vocabulary, v this rank's span of it.
"""

from __future__ import annotations

from typing import Any, cast

import attrs
import torch
from torch import Tensor

from mimo.model.parallel import TensorAxis


@attrs.frozen(kw_only=True, eq=False)
class Shares:
    """Rows of logits beside their labels: what a cross-entropy is made of, and its gradient.

    Attributes:
        exponentials: [T, v] of the logits less the largest of their row, in fp32 at least.
        top: [T] the largest logit of each row, of all spans.
        sums: [T] of the exponentials of each row, of all spans.
        columns: [T, 1] where each label lies in this span, [T, 0] of an empty one.
        here: likewise, whether it lies there.
    """

    exponentials: Tensor
    top: Tensor
    sums: Tensor
    columns: Tensor
    here: Tensor

    @classmethod
    def learn(
        cls, logits: Tensor, labels: Tensor, start: int, axis: TensorAxis, *, overwrites: bool
    ) -> tuple[Shares, Tensor]:
        """Return them, and the cross-entropy [T]: ``log(sums) - (logit of the label - top)``; asks all tensor ranks.

        Args:
            logits: [T, v].
            labels: [T] ids.
            start: first id of the span.
            axis: over which the vocabulary is cut.
            overwrites: computes where the logits lie, if they are in fp32.
        """
        top = axis.largest(_row_maximum(logits))
        columns, here = _columns(labels, start, logits.shape[1])
        less = _less(logits, top, overwrites=overwrites)
        target = less.gather(1, columns).masked_fill_(~here, 0.0).sum(1)
        exponentials = less.exp_()
        sums, target = axis.total(torch.stack((exponentials.sum(1), target)))
        found = cls(exponentials=exponentials, top=top, sums=sums, columns=columns, here=here)
        return found, sums.log() - target

    @classmethod
    def again(cls, logits: Tensor, labels: Tensor, start: int, *, top: Tensor, sums: Tensor) -> Shares:
        """Return them of logits that are made once more, of which top and sums are known; overwrites logits in fp32."""
        columns, here = _columns(labels, start, logits.shape[1])
        exponentials = _less(logits, top, overwrites=True).exp_()
        return cls(exponentials=exponentials, top=top, sums=sums, columns=columns, here=here)

    def gradient(self, each: Tensor) -> Tensor:
        """Return the gradient [T, v] of the logits of that of each row [T], where the exponentials lie."""
        each = each.unsqueeze(1)
        scaled = self.exponentials.mul_(each / self.sums.unsqueeze(1))
        return scaled.scatter_add_(1, self.columns, -each * self.here)


class _CrossEntropy(torch.autograd.Function):
    """One buffer holds the exponentials, then the gradients: a step has more logits than of anything else."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, start: int, axis: TensorAxis, overwrites: bool) -> Tensor:  # noqa: FBT001 - autograd passes by position
        shares, losses = Shares.learn(logits, labels, start, axis, overwrites=overwrites)
        ctx.save_for_backward(*attrs.astuple(shares, recurse=False))
        ctx.dtype = logits.dtype
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        names = (field.name for field in attrs.fields(Shares))
        shares = Shares(**dict(zip(names, ctx.saved_tensors, strict=True)))
        return shares.gradient(gradients[0]).to(ctx.dtype), None, None, None, None


def _less(logits: Tensor, top: Tensor, *, overwrites: bool) -> Tensor:
    """Return the logits less the largest of their row."""
    return _wide(logits.detach()).sub_(top.unsqueeze(1)) if overwrites else _wide(logits) - top.unsqueeze(1)


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
