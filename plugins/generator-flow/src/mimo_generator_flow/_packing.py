"""How pictures lie one after the other, each as the rows that it is made from and then its patches.

With several context ranks, or sequence parallelism, the sequence is cut into equal slices, padded at the end, wherever
they end. Between stages one row for each picture travels behind it: what its time has become.
Shapes: N pictures, L patches of each, R rows of the language model, S rows of the sequence of all pictures, t rows of
this rank's slice of it, padding included, c of these that are rows of the language model, p that are patches.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from mimo.model.runtime import PackedRows, Segments, to_device


@attrs.frozen(kw_only=True, eq=False)
class Packing:
    """Where the rows of some pictures lie. A picture that is made from no row has a learned one in their place.

    Args:
        rows: which of the sequence this rank holds.
        counts: rows of the language model that each picture is made from.
        lengths: rows of each picture in the sequence.
        total: rows that are cut into slices: S, and where a stage sends them those behind the sequence too.
        sent: rows that a stage sends, of all ranks.
        numbers: [c] on the CPU, which of all rows that pictures are made from those of this rank are.
        read: [c] which of R those are.
        joined: which of the learned one, c and p rows, one after the other, each of this rank's is, padding left out.
        owners: [t] which picture each row is of.
        mine: which of N·L patches are this rank's.
        patches: [p] where those are in t.
        places: [N·L] on the CPU, where all patches are in the sequence.
        segments: in which attention runs: each row sees all of its picture.
    """

    rows: PackedRows
    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    total: int
    sent: int
    numbers: Tensor
    read: Tensor
    joined: Tensor
    owners: Tensor
    mine: range
    patches: Tensor
    places: Tensor
    segments: Segments

    @classmethod
    def of(
        cls,
        spans: Sequence[tuple[int, int]],
        *,
        patches: int,
        device: torch.device,
        rows: PackedRows | None = None,
        sent: int = 0,
    ) -> Packing:
        """Return how pictures lie that are made from these spans of R, of so many patches each.

        Args:
            spans: of each picture.
            patches: L.
            device: where the sequence will be.
            rows: which of the sequence this rank holds; None for all.
            sent: rows that stages send; 0 where there is one stage.
        """
        rows, count = rows or PackedRows(), len(spans)
        counts = tuple(stop - start for start, stop in spans)
        lengths = tuple(max(own, 1) + patches for own in counts)
        length = sum(lengths)
        total = sent if sent and rows.slices > 1 else length
        held = rows.held(total)
        # Of each row of the sequence its picture, and its place from the first patch on: less than 0 before that.
        owners = torch.arange(count).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
        inside = torch.cat([torch.arange(0), *(torch.arange(patches - own, patches) for own in lengths)])
        is_patch = inside >= 0
        is_read = ~is_patch & torch.tensor([own > 0 for own in counts], dtype=torch.bool)[owners]
        here = slice(held.start, held.stop)
        before = slice(0, held.start)
        numbers = torch.arange(int(is_read[before].sum()), int(is_read[: held.stop].sum()))
        first = int(is_patch[before].sum())
        mine = range(first, first + int(is_patch[here].sum()))
        joined = torch.zeros(len(owners[here]), dtype=torch.int64)
        joined[is_read[here]] = torch.arange(1, 1 + len(numbers))
        joined[is_patch[here]] = torch.arange(1 + len(numbers), 1 + len(numbers) + len(mine))
        read = torch.cat([torch.arange(0), *(torch.arange(start, stop) for start, stop in spans)])
        padding = len(held) - len(joined)
        return cls(
            rows=rows,
            counts=counts,
            lengths=lengths,
            total=total,
            sent=sent,
            numbers=numbers,
            read=to_device(read[numbers], device),
            joined=to_device(joined, device),
            owners=to_device(functional.pad(owners[here], (0, padding), value=max(count - 1, 0)), device),
            mine=mine,
            patches=to_device(is_patch[here].nonzero().flatten(), device),
            places=is_patch.nonzero().flatten(),
            segments=Segments.sliced(
                lengths, causal=False, rows=len(rows.entered(total)), device=device, context=rows.context
            ),
        )

    @property
    def length(self) -> int:
        """Rows of the sequence, S."""
        return len(self.places) + sum(max(own, 1) for own in self.counts)

    def entered(self, connected: Tensor, patches: Tensor) -> Tensor:
        """Return this rank's rows [t, W] of the learned one with its c [1 + c, W], and of its patches [p, W]."""
        return self.rows.pad(rows_at(self.joined, torch.cat((connected, patches))), total=self.total)

    def message(self, x: Tensor, moments: Tensor) -> Tensor:
        """Return what this rank sends to the next stage: of its rows [t, W], and of pictures' moments [N, W]."""
        held, length, count = self.rows.held(self.sent), self.length, len(moments)
        index = torch.arange(held.start, max(held.start, min(held.stop, length + count)))
        index = torch.where(index < length, index - held.start, index - length + len(x))
        return self.rows.pad(rows_at(to_device(index, x.device), torch.cat((x, moments))), total=self.sent)

    def received(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a stage before has sent: this rank's rows [t, W], and the moments of all pictures [N, W]."""
        moments = self.rows.gather(hidden, total=self.sent)[self.length :][: len(self.counts)]
        return hidden[: len(self.owners)], moments

    def each_once(self, losses: Tensor) -> Tensor:
        """Return this rank's slice of the losses of N·L patches, of those that it has computed, [p]."""
        spread = losses.new_zeros(len(self.owners), 1).index_copy(0, self.patches, losses.unsqueeze(1))
        return self.rows.take(spread, self.places, total=self.total).squeeze(1)


def rows_at(index: Tensor, rows: Tensor) -> Tensor:
    """Return ``rows`` [N, F] at an index [T] that may repeat, [T, F].

    The gradient of one that repeats is summed in the same order in each run, on CUDA too, as that of `index_select` is
    not.
    """
    return functional.embedding(index, rows)
