"""The cross-entropy of rows whose logits never lie in memory all at once.

Logits of a few rows are made, used and dropped; backward makes them once more. With a large vocabulary they would else
be most of what a step holds: 8,192 rows of 152,000 logits are 5 GB. Shapes: T rows, H hidden, v this rank's span.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import attrs
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mimo.model.layers.deferred_weights import DefersWeightGrads, WeightGradQueue
from mimo.model.layers.vocabulary import Shares, vocabulary_cross_entropy
from mimo.model.parallel import TensorAxis


@attrs.frozen(kw_only=True, eq=False)
class Head:
    """What makes logits of rows.

    Args:
        logits: of rows [T, H], and the number of the first of them, this rank's logits [T, v], without any other rank.
        parameters: what it reads that is trained.
        layers: those that read them, which defer their gradients.
    """

    logits: Callable[[Tensor, int], Tensor]
    parameters: Sequence[Tensor]
    layers: Sequence[DefersWeightGrads]

    @contextmanager
    def deferring(self) -> Iterator[WeightGradQueue]:
        """Have its layers defer weight gradients to a queue of their own."""
        queue, others = WeightGradQueue(), [layer.weight_grad_queue for layer in self.layers]
        try:
            for layer in self.layers:
                layer.weight_grad_queue = queue
            yield queue
        finally:
            for layer, other in zip(self.layers, others, strict=True):
                layer.weight_grad_queue = other


def chunked_cross_entropy(
    hidden: Tensor, labels: Tensor, head: Head, *, rows: int, vocabulary: int, axis: TensorAxis
) -> Tensor:
    """Return the cross-entropy [T] of each row in fp32 at least, the same on all tensor ranks.

    Peak memory beside rows and gradients is that of ``rows`` rows of logits, not of T. Where T is larger, backward
    makes the logits once more, and computes the gradients of weights at once, deferred or not.

    Args:
        hidden: [T, H], on all tensor ranks.
        labels: [T] ids, each in ``0 .. vocabulary - 1``.
        head: makes the logits.
        rows: of how many at a time; 0: of all.
        vocabulary: V.
        axis: over which the vocabulary is cut.
    """

    def whole(some: Tensor, ids: Tensor, first: int = 0) -> Tensor:
        return vocabulary_cross_entropy(
            head.logits(some, first), ids, vocabulary=vocabulary, axis=axis, overwrites=True
        )

    if not 0 < rows < len(hidden):
        return whole(hidden, labels)
    if not torch.is_grad_enabled():
        firsts = range(0, len(hidden), rows)
        return torch.cat([whole(*chunk) for chunk in zip(hidden.split(rows), labels.split(rows), firsts, strict=True)])
    how = _How(head=head, rows=rows, start=axis.span(vocabulary).start, axis=axis)
    return cast("Tensor", _Chunked.apply(hidden, labels, how, *head.parameters))  # type: ignore[no-untyped-call]  # torch leaves it untyped


@attrs.frozen(kw_only=True, eq=False)
class _How:
    head: Head
    rows: int
    start: int
    axis: TensorAxis


class _Chunked(torch.autograd.Function):
    """Saves rows, and of the logits the largest and the sum of each row: what backward would else ask of all ranks."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, labels: Tensor, how: _How, *parameters: Tensor) -> Tensor:
        losses, tops, sums = [], [], []
        firsts = range(0, len(hidden), how.rows)
        for some, ids, first in zip(hidden.split(how.rows), labels.split(how.rows), firsts, strict=True):
            shares, found = Shares.learn(_logits(how.head, some, first), ids, how.start, how.axis, overwrites=True)
            losses.append(found)
            tops.append(shares.top)
            sums.append(shares.sums)
            del shares  # before the next one's
        ctx.save_for_backward(hidden, labels, torch.cat(tops), torch.cat(sums))
        ctx.how, ctx.parameters = how, parameters
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        how: _How = ctx.how
        hidden, *others = ctx.saved_tensors
        of_hidden, sums = torch.empty_like(hidden), dict[Tensor, Tensor]()
        chunks = (tensor.split(how.rows) for tensor in (of_hidden, hidden, *others, gradients[0]))
        with how.head.deferring() as queue:
            for first, of_some, some, ids, top, total, each in zip(
                range(0, len(hidden), how.rows), *chunks, strict=True
            ):
                leaf = some.detach().requires_grad_()
                edge, gradient = _gradient(how, leaf, ids, first=first, top=top, sums=total, each=each)
                with queue.collect() as deferred:
                    of_some[:] = torch.autograd.grad([edge], [leaf], [gradient])[0]
                deferred.add_to(sums)
                del edge, gradient  # before the next one's
        needed = [one for one, wanted in zip(ctx.parameters, ctx.needs_input_grad[3:], strict=True) if wanted]
        assert sums.keys() == set(needed), "each layer of a head defers the gradients of its weights"
        return of_hidden, None, None, *map(sums.get, ctx.parameters)


def _logits(head: Head, some: Tensor, first: int) -> Tensor:
    """Return the logits to overwrite, by the same products as with gradients, to the bit."""
    with torch.enable_grad():
        return head.logits(some.detach().requires_grad_(), first).detach()


def _gradient(
    how: _How, some: Tensor, ids: Tensor, *, first: int, top: Tensor, sums: Tensor, each: Tensor
) -> tuple[GradientEdge, Tensor]:
    """Return where the backward of the logits of some rows begins, and their gradient; the logits are gone by then."""
    with torch.enable_grad():
        logits = how.head.logits(some, first)
    edge, dtype = get_gradient_edge(logits), logits.dtype
    shares = Shares.again(logits, ids, how.start, top=top, sums=sums)
    del logits
    return edge, shares.gradient(each).to(dtype)
