"""Where the segments of packed rows lie, and which rows are the queries and keys of each kernel call of attention.

Worked out once for a microbatch, it serves all layers.
Shapes: T rows of this rank, G rows of all context ranks without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import attrs
import torch
from torch import Tensor

from mimo.model.attention.call_rows import gathered_rows
from mimo.model.attention.chunks import Chunk, Cut, Spans, cut_rows, cut_segments
from mimo.model.attention.padded import PaddedCalls
from mimo.model.attention.varlen import VarlenCall
from mimo.model.graphs import ForGraphs, carry
from mimo.model.parallel import ContextAxis


class CarriedSegments(NamedTuple):  # which can also be made inside of a graph
    """`Segments` for a compiled layer, which hands them on to `attend` unseen.

    Args:
        carrier: carries them.
    """

    carrier: Tensor


@attrs.frozen(kw_only=True, eq=False)
class Segments(ForGraphs):
    """Where the segments of packed rows lie; make it with `Segments.of` or another of its class methods.

    Args:
        cut: which rows of which segments the first of T are, and what they look at.
        rows: rows of this rank, T, the padding at the end included.
        held: rows whose keys this rank hands to `attend`; more than its own where some came before.
        device: where attention will run.
        gathered: where each row of the segments is among the rows that are looked at: those of T, with several context
            ranks of G; None where this rank holds whole segments, which look at themselves.
        context: over which the rows are split.
        counts: rows of each context rank without padding.
        single_mask: [C, 1, 1, L] of segments of one row each, which of the keys it sees; None for all.
    """

    cut: Cut
    rows: int
    held: int
    device: torch.device
    gathered: Tensor | None = None
    context: ContextAxis
    counts: tuple[int, ...]
    single_mask: Tensor | None = None

    def for_graphs(self) -> CarriedSegments:
        """Return what stands for them in a graph."""
        return CarriedSegments(carry(self))

    @cached_property
    def padded(self) -> PaddedCalls:
        """The calls in which chunks of about one length share one."""
        return PaddedCalls.of(self.cut, gathered=self.gathered, device=self.device)

    @cached_property
    def varlen(self) -> VarlenCall:
        """The one call without padding that some devices know."""
        return VarlenCall.of(self.cut, gathered=self.gathered, device=self.device)

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        *,
        causal: bool,
        window: int = 0,
        rows: int | None = None,
        device: torch.device | str = "cpu",
        context: ContextAxis | None = None,
        items: Sequence[Spans] = (),
    ) -> Segments:
        """Return the segments of these lengths, 0 included, one after the other.

        Args:
            lengths: rows of each segment, on all context ranks together.
            causal: whether a row sees only itself and earlier rows of its segment.
            window: of these, how many it sees at most, itself among them; 0 for all.
            rows: T, where padding at the end follows the last segment.
            device: where attention will run.
            context: where several ranks each hold `mimo.topology.context_spans` of every segment.
            items: of each segment, or none: each row of one sees all of its rows, but those that a window ends before.
        """
        context = context or ContextAxis.single()
        assert causal or not (window or items), "a window looks back, and what is not causal sees all of an item"
        held = cut_segments(lengths, size=context.size)
        return cls._of(
            held, lengths, causal=causal, window=window, rows=rows, device=device, context=context, items=items
        )

    @classmethod
    def sliced(
        cls,
        lengths: Sequence[int],
        *,
        causal: bool,
        rows: int,
        device: torch.device | str = "cpu",
        context: ContextAxis,
    ) -> Segments:
        """Return the same where each context rank holds a slice of T packed rows, cut wherever it ends.

        Args:
            lengths: rows of each segment, on all context ranks together.
            causal: whether a row sees only itself and earlier rows of its segment.
            rows: T, the same on each context rank; padding follows the last segment.
            device: where attention will run.
            context: the ranks, in the order of their slices.
        """
        held = cut_rows(lengths, rows=rows, size=context.size)
        return cls._of(held, lengths, causal=causal, window=0, rows=rows, device=device, context=context)

    @classmethod
    def crossed(
        cls,
        lengths: Sequence[int],
        *,
        queries: int,
        rows: int,
        part: int = 0,
        parts: int = 1,
        device: torch.device | str = "cpu",
    ) -> Segments:
        """Return segments in which as many rows for each look at other rows, all of them held here.

        Args:
            lengths: of each segment, how many rows are looked at; they are packed.
            queries: rows of each segment that look.
            rows: T, a slice of the packed rows that look, the same in each part; padding follows the last segment.
            part: which of the slices.
            parts: how many there are.
            device: where attention will run.
        """
        chunks = cut_rows([queries] * len(lengths), rows=rows, size=parts)[part]
        cut = Cut.of(chunks, lengths, causal=False)
        return cls(
            cut=cut,
            rows=rows,
            held=sum(lengths),
            device=torch.device(device),
            gathered=torch.arange(sum(lengths)),
            context=ContextAxis.single(),
            counts=(cut.rows,),
        )

    @classmethod
    def continued(
        cls,
        lengths: Sequence[int],
        *,
        before: Sequence[int],
        window: int = 0,
        device: torch.device | str = "cpu",
        items: Sequence[Spans] = (),
    ) -> Segments:
        """Return the last rows of causal segments, of which others came earlier and have only keys now.

        Args:
            lengths: rows of each segment, 0 included, one segment after the other.
            before: how many keys and values of each stand before those of its rows, if it has any.
            window: how many rows each sees at most, itself among them; 0 for all.
            device: where attention will run.
            items: of each segment, or none, counted from the first of its keys; each in these rows or outside.
        """
        held = [earlier + rows if rows else 0 for earlier, rows in zip(before, lengths, strict=True)]
        chunks = [
            Chunk(segment, stop - rows, stop)
            for segment, (rows, stop) in enumerate(zip(lengths, held, strict=True))
            if rows
        ]
        rows = sum(lengths)
        return cls(
            cut=Cut.of(chunks, held, causal=True, window=window, items=items),
            rows=rows,
            held=sum(held),
            device=torch.device(device),
            gathered=torch.arange(sum(held)),
            context=ContextAxis.single(),
            counts=(rows,),
        )

    @classmethod
    def single_rows(
        cls, held: Sequence[int], *, keys: int, window: int = 0, device: torch.device | str = "cpu"
    ) -> Segments:
        """Return one row of each segment, which sees the segment's keys; `attend` takes these as [C, K, L, D].

        Args:
            held: how many of its L keys each row sees, the first ones; at least one.
            keys: L.
            window: of these, how many of the last it sees at most; 0 for all.
            device: where attention will run.
        """
        count, mask = len(held), None
        if any(own < keys for own in held) or 0 < window < keys:
            at, ends = torch.arange(keys, device=device), torch.tensor(held, device=device).unsqueeze(1)
            mask = (at < ends) if not window else (at < ends) & (at >= ends - window)
            mask = mask.view(count, 1, 1, keys)
        return cls(
            cut=Cut.of([Chunk(segment, 0, 1) for segment in range(count)], [keys] * count, causal=False),
            rows=count,
            held=count * keys,
            device=torch.device(device),
            context=ContextAxis.single(),
            counts=(count,),
            single_mask=mask,
        )

    @classmethod
    def _of(
        cls,
        held: Sequence[Sequence[Chunk]],
        lengths: Sequence[int],
        *,
        causal: bool,
        window: int,
        rows: int | None,
        device: torch.device | str,
        context: ContextAxis,
        items: Sequence[Spans] = (),
    ) -> Segments:
        counts = tuple(sum(chunk.rows for chunk in each) for each in held)
        used = counts[context.rank]
        total = used if rows is None else rows
        assert used <= total, f"{used} rows of segments in {total}"
        return cls(
            cut=Cut.of(held[context.rank], lengths, causal=causal, window=window, items=items),
            rows=total,
            held=used,
            device=torch.device(device),
            gathered=gathered_rows(held, lengths) if context.size > 1 else None,
            context=context,
            counts=counts,
        )
