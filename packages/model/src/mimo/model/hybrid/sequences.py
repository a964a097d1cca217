"""Packed samples as a recurrence needs them: whole and in order, whatever context ranks hold of their rows.

With several context ranks the balanced split is undone: each rank gets all rows of its share of the columns (heads),
runs over them, and gives what it made of them back to the ranks whose rows they are. One message each way.
Shapes: T rows of this rank, R of them in no padding, G rows of all context ranks without padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from mimo.model.attention import CacheStep, cut_segments
from mimo.model.layers import SampleChunks
from mimo.model.parallel import ContextAxis
from mimo.topology.device_copies import to_device


@attrs.frozen(kw_only=True, eq=False)
class Sequences:
    """The samples of one microbatch; make it with `Sequences.of`.

    Args:
        rows: of this rank, T, the padding at the end included.
        counts: rows of each context rank without the padding.
        chunks: of the samples, on all context ranks together.
        order: [G] which row each row of the samples is, among all ranks' one rank after the other; None for one rank.
        place: [G] the inverse.
        context: over which the rows are split.
        pieces: where cached sequences are continued, the chunks of each run of them (`LayerCache.runs`); None for
            single rows, which need none.
    """

    rows: int
    counts: tuple[int, ...]
    chunks: SampleChunks
    order: Tensor | None
    place: Tensor | None
    context: ContextAxis
    pieces: tuple[SampleChunks | None, ...] = ()

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        *,
        rows: int,
        chunk: int,
        step: CacheStep | None = None,
        device: torch.device | str = "cpu",
        context: ContextAxis | None = None,
    ) -> Sequences:
        """Return the samples of these lengths, 0 included, one after the other.

        Args:
            lengths: rows of each sample, on all context ranks together.
            rows: T, where padding at the end follows the last sample.
            chunk: rows of a chunk, see `SampleChunks`.
            step: of a decode cache whose sequences are continued.
            device: where they will be run over.
            context: where several ranks each hold `mimo.topology.context_spans` of every sample.
        """
        context = context or ContextAxis.single()
        held = cut_segments(lengths, size=context.size)
        place = None
        if context.size > 1:
            firsts = torch.tensor([0, *lengths]).cumsum(0).tolist()
            spans = [
                torch.arange(firsts[one.segment] + one.start, firsts[one.segment] + one.stop)
                for each in held
                for one in each
            ]
            place = torch.cat([torch.arange(0), *spans])
        return cls(
            rows=rows,
            counts=tuple(sum(one.rows for one in each) for each in held),
            chunks=SampleChunks.of(lengths if step is None else (), chunk=chunk, device=device),
            order=None if place is None else to_device(place.argsort(), device),
            place=None if place is None else to_device(place, device),
            context=context,
            pieces=() if step is None else tuple(_pieces(step, chunk)),
        )

    def take(self, shares: Sequence[Tensor]) -> Tensor:
        """Return this rank's share of the columns of all rows, samples in order, [G, W of this rank].

        Args:
            shares: [T, W], for each context rank the columns that it takes; they may have some in common.
        """
        used = self.counts[self.context.rank]
        if self.order is None:
            return shares[0][:used]
        widths = [share.shape[1] for share in shares]
        rows = self.context.to_columns([share[:used] for share in shares], self.counts, widths)
        return rows.index_select(0, self.order)

    def put(self, y: Tensor, widths: Sequence[int]) -> Tensor:
        """Return all columns of this rank's rows, [T, sum of W], zero in the padding; each rank calls it.

        Args:
            y: [G, W of this rank], what this rank made of its share.
            widths: W of each context rank.
        """
        used = self.counts[self.context.rank]
        if self.place is not None:
            y = self.context.to_rows(y.index_select(0, self.place), self.counts, widths)
        return functional.pad(y, (0, 0, 0, self.rows - used))


def _pieces(step: CacheStep, chunk: int) -> Iterator[SampleChunks | None]:
    """Yield the chunks of each run of a step's rows."""
    for run in step.runs:
        before = step.before[run.first]
        is_single = run.rows == 1
        yield None if is_single else SampleChunks.of((run.rows,), chunk=chunk, before=before, device=step.device)
