"""Losses of rows whose logits never lie in memory all at once.

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

from mimo.model.layers import DefersWeightGrads, WeightGradQueue
from mimo.model.losses.rows import RowLoss, row_losses


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


def chunked_losses(hidden: Tensor, head: Head, losses: Sequence[RowLoss], *, rows: int) -> tuple[Tensor, ...]:
    """Return each loss [T] of rows in fp32 at least, the same on all tensor ranks.

    Peak memory beside rows and gradients is that of ``rows`` rows of logits, once for each loss, not of T. Where T is
    larger, backward makes the logits once more, and computes the gradients of weights at once, deferred or not.

    Args:
        hidden: [T, H], on all tensor ranks.
        head: makes the logits.
        losses: of T rows each.
        rows: of how many at a time; 0: of all.
    """
    if not 0 < rows < len(hidden):
        return row_losses(head.logits(hidden, 0), losses, overwrites=True)
    how = _How(head=head, losses=tuple(losses), chunks=chunks_of(len(hidden), rows))
    if torch.is_grad_enabled():
        return cast("tuple[Tensor, ...]", _Chunked.apply(hidden, how, *head.parameters))  # type: ignore[no-untyped-call]  # torch leaves it untyped
    found = [
        row_losses(head.logits(hidden[some], some.start), how.losses_of(some), overwrites=True) for some in how.chunks
    ]
    return tuple(map(torch.cat, zip(*found, strict=True)))


def chunks_of(total: int, rows: int) -> list[slice]:
    """Return slices of so many rows, together all, at least one; 0: one of all."""
    each = rows or max(total, 1)
    return [slice(first, first + each) for first in range(0, max(total, 1), each)]


@attrs.frozen(kw_only=True, eq=False)
class _How:
    head: Head
    losses: tuple[RowLoss, ...]
    chunks: Sequence[slice]

    def losses_of(self, some: slice) -> list[RowLoss]:
        return [loss.of(some) for loss in self.losses]


class _Chunked(torch.autograd.Function):
    """Saves rows, and of their logits what a loss would else have to ask all tensor ranks for in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, how: _How, *parameters: Tensor) -> tuple[Tensor, ...]:
        found: list[list[Tensor]] = [[] for _ in how.losses]
        known: list[list[tuple[Tensor, ...]]] = [[] for _ in how.losses]
        last = len(how.losses) - 1
        for some in how.chunks:
            logits = _logits(how.head, hidden[some], some.start)
            for index, loss in enumerate(how.losses_of(some)):
                read, each = loss.learn(logits, overwrites=index == last)
                found[index].append(each)
                known[index].append(read.known)
                del read  # before the next one's
            del logits
        joined = [tuple(map(torch.cat, zip(*parts, strict=True))) for parts in known]
        ctx.save_for_backward(hidden, *(tensor for parts in joined for tensor in parts))
        ctx.how, ctx.parameters, ctx.counts = how, parameters, [len(parts) for parts in joined]
        ctx.set_materialize_grads(False)
        return tuple(map(torch.cat, found))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        how: _How = ctx.how
        hidden, *saved = ctx.saved_tensors
        rest = iter(saved)
        known = [tuple(next(rest) for _ in range(count)) for count in ctx.counts]
        of_hidden, sums = torch.empty_like(hidden), dict[Tensor, Tensor]()
        with how.head.deferring() as queue:
            for some in how.chunks:
                leaf = hidden[some].detach().requires_grad_()
                wanted = [
                    (loss, tuple(one[some] for one in own), each[some])
                    for loss, own, each in zip(how.losses_of(some), known, gradients, strict=True)
                    if each is not None
                ]
                edge, gradient = _gradient(how.head, leaf, some.start, wanted)
                with queue.collect() as deferred:
                    of_hidden[some] = torch.autograd.grad([edge], [leaf], [gradient])[0]
                deferred.add_to(sums)
                del edge, gradient  # before the next one's
        needed = [one for one, wanted in zip(ctx.parameters, ctx.needs_input_grad[2:], strict=True) if wanted]
        assert sums.keys() == set(needed), "each layer of a head defers the gradients of its weights"
        return of_hidden, None, *map(sums.get, ctx.parameters)


def _logits(head: Head, some: Tensor, first: int) -> Tensor:
    """Return the logits to overwrite, by the same products as with gradients, to the bit."""
    with torch.enable_grad():
        return head.logits(some.detach().requires_grad_(), first).detach()


def _gradient(
    head: Head, some: Tensor, first: int, wanted: Sequence[tuple[RowLoss, tuple[Tensor, ...], Tensor]]
) -> tuple[GradientEdge, Tensor]:
    """Return where the backward of the logits of some rows begins, and their gradient; the logits are gone by then.

    Args:
        head: makes the logits.
        some: rows.
        first: number of the first of them.
        wanted: losses of them, each with what is known of their logits, and the gradient [T] of each row's.
    """
    with torch.enable_grad():
        logits = head.logits(some, first)
    edge, dtype = get_gradient_edge(logits), logits.dtype
    *others, (last, known, each) = wanted
    found = [loss.again(logits, own, overwrites=False).gradient(grad) for loss, own, grad in others]
    read = last.again(logits, known, overwrites=True)
    del logits
    total = read.gradient(each)
    for other in found:
        total += other
    return edge, total.to(dtype)
