"""Losses of rows by their logits, which are split over tensor ranks: what they have in common.

A loss is asked twice: `RowLoss.learn` returns it, and what its gradient follows from; where the logits have been
dropped since, `RowLoss.again` returns the latter of logits that are made once more, without any other rank.
Shapes: T rows, V vocabulary, v this rank's span of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, Self, cast

import attrs
import torch
from torch import Tensor


class LogitsRead(Protocol):
    """What a loss has found in logits [T, v]: an attrs class of tensors alone."""

    @property
    def known(self) -> tuple[Tensor, ...]:
        """What of it only all tensor ranks know, each [T, …]."""
        ...

    def gradient(self, each: Tensor) -> Tensor:
        """Return the gradient [T, v] of the logits, from that of each row's loss [T]; computes in what it holds."""
        ...


class RowLoss(Protocol):
    """A loss of T rows, with what they are compared with."""

    def of(self, some: slice) -> Self:
        """Return the loss of some of the rows."""
        ...

    def learn(self, logits: Tensor, *, overwrites: bool) -> tuple[LogitsRead, Tensor]:
        """Return what it finds, and the loss [T] of each row in fp32 at least, the same on all tensor ranks.

        Args:
            logits: [T, v].
            overwrites: computes where the logits lie, if they are in fp32.
        """
        ...

    def again(self, logits: Tensor, known: tuple[Tensor, ...], *, overwrites: bool) -> LogitsRead:
        """Return what `learn` found, of equal logits that are made once more, with its ``known``."""
        ...


def row_losses(logits: Tensor, losses: Sequence[RowLoss], *, overwrites: bool = False) -> tuple[Tensor, ...]:
    """Return each loss [T] of rows in fp32 at least, the same on all tensor ranks.

    One backward can go through them.

    Args:
        logits: [T, v], this rank's span.
        losses: of them.
        overwrites: computes where the logits lie, if they are in fp32; nobody else may then need them, nor a backward.
    """
    return cast("tuple[Tensor, ...]", _OfLogits.apply(logits, tuple(losses), overwrites))  # type: ignore[no-untyped-call]  # torch leaves it untyped


class _OfLogits(torch.autograd.Function):
    """One buffer holds what a loss has found, then its gradient: a step has more logits than of anything else."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, losses: tuple[RowLoss, ...], overwrites: bool) -> tuple[Tensor, ...]:  # noqa: FBT001 - autograd passes by position
        last = len(losses) - 1
        both = [loss.learn(logits, overwrites=overwrites and index == last) for index, loss in enumerate(losses)]
        ctx.save_for_backward(*(tensor for read, _ in both for tensor in _tensors(read)))
        ctx.kinds, ctx.dtype = [type(read) for read, _ in both], logits.dtype
        ctx.set_materialize_grads(False)
        return tuple(found for _, found in both)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None]:
        saved = iter(ctx.saved_tensors)
        reads = [_read_from(kind, saved) for kind in ctx.kinds]
        found = [read.gradient(each) for read, each in zip(reads, gradients, strict=True) if each is not None]
        for other in found[1:]:
            found[0] += other
        return found[0].to(ctx.dtype) if found else None, None, None


def _tensors(read: LogitsRead) -> tuple[Tensor, ...]:
    return attrs.astuple(cast("Any", read), recurse=False)


def _read_from(kind: type, tensors: Iterator[Tensor]) -> LogitsRead:
    return cast("LogitsRead", kind(**{field.name: next(tensors) for field in attrs.fields(kind)}))


def row_maximum(logits: Tensor) -> Tensor:
    """Return the largest logit [T] of each row in fp32 at least, minus infinity where the span is empty."""
    if logits.shape[1] == 0:
        return wide(logits.new_full(logits.shape[:1], -torch.inf))
    return wide(logits.amax(1))


def columns_of(ids: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the columns of ids [T, k] in a span, and whether they lie there, both [T, k]; [T, 0] of an empty span."""
    columns = (ids - start)[:, : ids.shape[1] if width else 0]
    here = (columns >= 0) & (columns < width)
    return columns.clamp(0, max(width - 1, 0)), here


def wide(x: Tensor) -> Tensor:
    """Return numbers in fp32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
