"""Cross-entropy and argmax over a vocabulary whose logits are split over tensor ranks, spans uneven or empty.

Shapes: T rows, V vocabulary, v this rank's span of it.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from mimo.model.losses.rows import columns_of, row_losses, row_maximum, wide
from mimo.model.parallel import TensorAxis


@attrs.frozen(kw_only=True, eq=False)
class _Shares:
    """What a cross-entropy is made of, and its gradient.

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

    @property
    def known(self) -> tuple[Tensor, ...]:
        """The largest logit of each row, and the sum of its exponentials."""
        return self.top, self.sums

    def gradient(self, each: Tensor) -> Tensor:
        """Return the gradient [T, v] of the logits, where the exponentials lie."""
        each = each.unsqueeze(1)
        scaled = self.exponentials.mul_(each / self.sums.unsqueeze(1))
        return scaled.scatter_add_(1, self.columns, -each * self.here)


@attrs.frozen(kw_only=True, eq=False)
class CrossEntropy:
    """The cross-entropy of rows, a `mimo.model.losses.RowLoss`: ``log(sums) - (logit of the label - top)``.

    Args:
        labels: [T] ids, each in ``0 .. vocabulary - 1``.
        vocabulary: V.
        axis: over which it is cut.
    """

    labels: Tensor
    vocabulary: int
    axis: TensorAxis

    def of(self, some: slice) -> CrossEntropy:
        """Return the loss of some of the rows."""
        return attrs.evolve(self, labels=self.labels[some])

    def learn(self, logits: Tensor, *, overwrites: bool) -> tuple[_Shares, Tensor]:
        """Return what the gradient is made of, and the loss [T]; asks all tensor ranks."""
        top = self.axis.largest(row_maximum(logits))
        columns, here = self._columns(logits)
        less = _less(logits, top, overwrites=overwrites)
        target = less.gather(1, columns).masked_fill_(~here, 0.0).sum(1)
        exponentials = less.exp_()
        sums, target = self.axis.total(torch.stack((exponentials.sum(1), target)))
        found = _Shares(exponentials=exponentials, top=top, sums=sums, columns=columns, here=here)
        return found, sums.log() - target

    def again(self, logits: Tensor, known: tuple[Tensor, ...], *, overwrites: bool) -> _Shares:
        """Return what the gradient is made of once more."""
        top, sums = known
        columns, here = self._columns(logits)
        exponentials = _less(logits, top, overwrites=overwrites).exp_()
        return _Shares(exponentials=exponentials, top=top, sums=sums, columns=columns, here=here)

    def _columns(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return columns_of(self.labels.unsqueeze(1), self.axis.span(self.vocabulary).start, logits.shape[1])


def _less(logits: Tensor, top: Tensor, *, overwrites: bool) -> Tensor:
    """Return the logits less the largest of their row."""
    return wide(logits.detach()).sub_(top.unsqueeze(1)) if overwrites else wide(logits) - top.unsqueeze(1)


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
    (found,) = row_losses(
        logits, [CrossEntropy(labels=labels, vocabulary=vocabulary, axis=axis)], overwrites=overwrites
    )
    return found


def vocabulary_argmax(logits: Tensor, *, vocabulary: int, axis: TensorAxis) -> Tensor:
    """Return for each row the id [T] of the largest logit, of equal ones the lowest, the same on all tensor ranks."""
    span = axis.span(vocabulary)
    highest = row_maximum(logits)
    top = axis.largest(highest)
    found = torch.full_like(highest, vocabulary - 1, dtype=torch.long)
    if span:
        found = torch.where(highest == top, logits.argmax(1) + span.start, found)
    return axis.smallest(found)
