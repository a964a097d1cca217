"""Which of an encoder's packed rows a rank holds, and how rows that lie on several ranks come together again.

With context ranks, and with sequence parallelism tensor ranks too, each holds an equal slice of the packed rows of all
items, padded at the end, and may begin and end in the middle of an item.
Shapes: T rows of all items, t rows of this rank, W columns.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from mimo.model.attention import Segments
from mimo.model.parallel import ContextAxis, TensorAxis
from mimo.topology.device_copies import to_device


@attrs.frozen(kw_only=True)
class PackedRows:
    """This rank's slice of packed rows. Of an encoder that is not split it is all of them.

    Args:
        axis: over whose ranks, with sequence parallelism, the rows of a context rank are split.
        context: over whose ranks all rows are split.
    """

    axis: TensorAxis = attrs.field(factory=TensorAxis.single)
    context: ContextAxis = attrs.field(factory=ContextAxis.single)

    @property
    def slices(self) -> int:
        """Number of slices that the rows are cut into."""
        return self.context.size * (self.axis.size if self.axis.splits_rows else 1)

    def held(self, total: int) -> range:
        """Return which of ``total`` rows are this rank's; the last slices may reach beyond the end, into padding."""
        index = self.context.rank
        if self.axis.splits_rows:
            index = index * self.axis.size + self.axis.rank
        each = -(-total // self.slices)
        return range(index * each, (index + 1) * each)

    def entered(self, total: int) -> range:
        """Return which of ``total`` rows this rank has inside of `TensorAxis.enter` .. ``leave``, padding included."""
        each = self._entered(total)
        return range(self.context.rank * each, (self.context.rank + 1) * each)

    def segments(self, lengths: Sequence[int], *, device: torch.device | str) -> Segments:
        """Return the segments in which each row attends to all rows of its item, for `EncoderLayer`.

        Args:
            lengths: rows of each item, those of all ranks.
            device: where attention will run.
        """
        rows = self._entered(sum(lengths))
        return Segments.sliced(lengths, causal=False, rows=rows, device=device, context=self.context)

    def crossed(self, lengths: Sequence[int], *, queries: int, device: torch.device | str) -> Segments:
        """Return the segments in which as many rows for each item look at all its rows, for `CrossAttention`.

        Args:
            lengths: rows of each item that are looked at, those of all ranks.
            queries: rows of each item that look; packed they are cut like any others.
            device: where attention will run.
        """
        rows, context = self._entered(len(lengths) * queries), self.context
        return Segments.crossed(
            lengths, queries=queries, rows=rows, part=context.rank, parts=context.size, device=device
        )

    def _entered(self, total: int) -> int:
        """Return how many of ``total`` rows attention sees here: those of all tensor ranks, which may hold slices."""
        return -(-total // self.slices) * (self.axis.size if self.axis.splits_rows else 1)

    def pad(self, x: Tensor, *, total: int) -> Tensor:
        """Return this rank's rows of ``total`` with zeros where its slice reaches beyond them."""
        missing = len(self.held(total)) - len(x)
        return functional.pad(x, (0, 0, 0, missing)) if missing else x

    def gather(self, x: Tensor, *, total: int) -> Tensor:
        """Return the rows of all ranks [T, W] on each of them. Every rank must call it, and its backward.

        The gradient of this rank's rows is the sum of what all ranks computed with them: each must go on with a part
        of the work that is its own.

        Args:
            x: this rank's slice [t, W].
            total: T.
        """
        if self.axis.splits_rows:
            x = self.axis.enter(x)
        return self.context.share(x, [len(x)] * self.context.size)[:total]

    def take(self, x: Tensor, index: Tensor, *, total: int) -> Tensor:
        """Return this rank's slice of ``rows[index]``, where ``rows`` [T, W] are those of all ranks.

        So rows are dropped, repeated, joined or brought into another order, wherever the slices are cut.

        Args:
            x: this rank's slice of the rows [t, W].
            index: [R] which row each of the results is, or [R, K] which rows, one after the other as one row [K·W]; the
                same on each rank.
            total: T.
        """
        count = len(index)
        mine = self.held(count)
        index = to_device(index[mine.start : mine.stop], x.device)
        rows = self.gather(x, total=total) if self.slices > 1 else x
        taken = rows.index_select(0, index.flatten()).view(len(index), index.shape[1:].numel() * x.shape[1])
        return self.pad(taken, total=count)


def touched_by(rows: range, lengths: Sequence[int]) -> tuple[slice, slice]:
    """Return which items packed ``rows`` touch, and which of the rows of those items they are.

    Args:
        rows: of all items one after the other; those beyond the end are none.
        lengths: rows of each item.
    """
    stops = list(accumulate(lengths))
    first, last = bisect_right(stops, rows.start), bisect_left(stops, rows.stop)
    offset = stops[first - 1] if first else 0
    return slice(first, last + 1), slice(rows.start - offset, rows.stop - offset)
