"""The context axis: how rows held by several context ranks of a module become visible to each of them.

Shapes: t rows of this rank, G rows of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from mimo.model.parallel.collectives import by_messages, exchange, linear
from mimo.model.parallel.tensor import chunk
from mimo.topology.collectives import all_gather_single, reduce_scatter_single


@attrs.frozen(kw_only=True)
class ContextAxis:
    """This rank's place among the ranks that share the rows of one lane. With ``size`` 1 it does nothing.

    Args:
        group: the ranks, None for one.
        rank: position of this rank among them.
        size: how many they are.
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1

    @classmethod
    def single(cls) -> ContextAxis:
        """Return the axis of a module whose lanes are whole on each rank."""
        return cls()

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> ContextAxis:
        """Return this rank's axis in ``group``, ranks ascending."""
        return cls() if group.size() == 1 else cls(group=group, rank=group.rank(), size=group.size())

    def spans(self, total: int) -> list[range]:
        """Return which of ``total`` indices each rank takes where they are shared out: uneven, even none."""
        return [chunk(total, size=self.size, rank=rank) for rank in range(self.size)]

    def share(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Return all ranks' rows one after the other, [t, …] -> [G, …].

        Every rank must call it, those without rows too, and its backward, in which each rank gets its rows of the
        sum of all ranks' gradients.

        Args:
            x: this rank's rows.
            counts: rows of each rank.
        """
        assert (len(counts), counts[self.rank]) == (self.size, len(x)), (counts, self.size, len(x))
        if self.size == 1:
            return x
        stops = list(accumulate(counts))
        spans = [slice(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]
        return linear(x, lambda rows: self._gather(rows, spans), lambda rows: self._scatter(rows, spans))

    def to_columns(self, shares: Sequence[Tensor], counts: Sequence[int], widths: Sequence[int]) -> Tensor:
        """Return some columns of all ranks' rows, one rank after the other, for all columns of this rank's: [G, W].

        Every rank must call it, those without rows too. Its adjoint is `to_rows`.

        Args:
            shares: [t, W] for each rank, the columns that it gets of this rank's rows.
            counts: rows of each rank.
            widths: W of each rank.
        """
        sent = [counts[self.rank] * width for width in widths]
        received = [count * widths[self.rank] for count in counts]
        flat = self._swap(torch.cat([share.flatten() for share in shares]), sent, received)
        return flat.view(-1, widths[self.rank]) if widths[self.rank] else flat.view(sum(counts), 0)

    def to_rows(self, y: Tensor, counts: Sequence[int], widths: Sequence[int]) -> Tensor:
        """Return all ranks' columns of this rank's rows, for this rank's columns of all rows: [G, W] -> [t, sum of W].

        Args:
            y: [G, W].
            counts: rows of each rank.
            widths: W of each rank.
        """
        sent = [count * widths[self.rank] for count in counts]
        received = [counts[self.rank] * width for width in widths]
        parts = self._swap(y.flatten(), sent, received).split(received)
        return torch.cat([part.view(-1, w) for part, w in zip(parts, widths, strict=True) if w], 1)

    def _swap(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send each rank its elements of ``x``, return what all sent here."""
        if self.size == 1:
            return x

        def swap(x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
            found = x.new_empty(sum(received))
            dist.all_to_all_single(found, x.contiguous(), list(received), list(sent), group=self.group)
            return found

        return linear(x, lambda x: swap(x, sent, received), lambda gradient: swap(gradient, received, sent))

    def _gather(self, x: Tensor, spans: Sequence[slice]) -> Tensor:
        assert self.group is not None
        x = x.contiguous()
        gathered = x.new_empty(spans[-1].stop, *x.shape[1:])
        if gathered.numel() == 0:
            return gathered
        if by_messages(x):
            gathered[spans[self.rank]] = x
            exchange(self.group, sent=lambda _peer: x, received=lambda peer: gathered[spans[peer]])
            return gathered
        longest = max(span.stop - span.start for span in spans)
        padded = x.new_zeros(longest, *x.shape[1:])
        padded[: len(x)] = x
        blocks = x.new_empty(self.size, *padded.shape)
        all_gather_single(blocks, padded, self.group)
        for block, span in zip(blocks, spans, strict=True):
            gathered[span] = block[: span.stop - span.start]
        return gathered

    def _scatter(self, x: Tensor, spans: Sequence[slice]) -> Tensor:
        assert self.group is not None
        mine = spans[self.rank]
        if x.numel() == 0:
            return x[mine]
        x = x.contiguous()
        if by_messages(x):
            others = x.new_empty(self.size - 1, mine.stop - mine.start, *x.shape[1:])
            exchange(
                self.group,
                sent=lambda peer: x[spans[peer]],
                received=lambda peer: others[peer - (peer > self.rank)],
            )
            return x[mine] + (others[0] if len(others) == 1 else others.sum(0))
        longest = max(span.stop - span.start for span in spans)
        blocks = x.new_zeros(self.size, longest, *x.shape[1:])
        for block, span in zip(blocks, spans, strict=True):
            block[: span.stop - span.start] = x[span]
        scattered = torch.empty_like(blocks[self.rank])
        reduce_scatter_single(scattered, blocks, self.group)
        return scattered[: mine.stop - mine.start]
