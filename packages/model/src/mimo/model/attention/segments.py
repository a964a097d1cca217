"""Where the segments of packed rows lie, and which rows are the queries and keys of each kernel call of attention.

Worked out once for a microbatch, it serves all layers. Segments of about one length become one batched call, padded
where no row looks.
Shapes: T rows of this rank, G rows of all context ranks without padding; in one call C chunks of segments, Q rows of
each, which look at L rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from mimo.model.attention.batches import CALL_COSTS, batch
from mimo.model.attention.call_rows import gathered_rows, keys_of, queries_of
from mimo.model.attention.calls import Call, Piece, call_of
from mimo.model.attention.chunks import Chunk, Spans, cut_rows, cut_segments, keys_of_chunks
from mimo.model.parallel import ContextAxis


@attrs.frozen(kw_only=True, eq=False)
class Segments:
    """Where the segments of packed rows lie; make it with `Segments.of` or another of its class methods.

    Args:
        causal: whether a row sees only itself and earlier rows of its segment.
        rows: rows of this rank, T, the padding at the end included.
        used: of these, rows that belong to a segment.
        held: rows whose keys this rank hands to `attend`; more than ``used`` where some came before.
        calls: for each kernel call its shape.
        query_index: [sum of C·Q] packed row that each query of the calls is; None when the order is the packed one.
        key_index: [sum of C·L] row of T, with several context ranks of G, that each key of the calls is; None likewise.
        inverse_index: [used] row of the calls that holds each packed row; None likewise.
        context: over which the rows are split.
        counts: used rows of each context rank.
    """

    causal: bool
    rows: int
    used: int
    held: int
    calls: tuple[Call, ...]
    query_index: Tensor | None
    key_index: Tensor | None
    inverse_index: Tensor | None
    context: ContextAxis
    counts: tuple[int, ...]

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
        keys = keys_of_chunks(chunks, lengths, causal=False)
        batches, calls = _calls(chunks, keys, causal=False, device=torch.device(device))
        query_index, inverse_index = queries_of(chunks, batches, calls)
        key_index = keys_of(torch.arange(sum(lengths)), chunks, batches, calls, keys=keys, lengths=lengths)
        used = sum(chunk.rows for chunk in chunks)
        return cls(
            causal=False,
            rows=rows,
            used=used,
            held=sum(lengths),
            calls=calls,
            query_index=query_index.to(device),
            key_index=key_index.to(device),
            inverse_index=inverse_index.to(device),
            context=ContextAxis.single(),
            counts=(used,),
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
        keys = keys_of_chunks(chunks, held, causal=True, items=items)
        batches, calls = _calls(chunks, keys, causal=True, window=window, device=torch.device(device), items=items)
        query_index, inverse_index = queries_of(chunks, batches, calls)
        key_index = keys_of(torch.arange(sum(held)), chunks, batches, calls, keys=keys, lengths=held)
        used = sum(lengths)
        return cls(
            causal=True,
            rows=used,
            used=used,
            held=sum(held),
            calls=calls,
            query_index=query_index.to(device),
            key_index=key_index.to(device),
            inverse_index=inverse_index.to(device),
            context=ContextAxis.single(),
            counts=(used,),
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
            causal=False,
            rows=count,
            used=count,
            held=count * keys,
            calls=(Call(count, 1, keys, (Piece(slice(1), slice(keys), mask),)),),
            query_index=None,
            key_index=None,
            inverse_index=None,
            context=ContextAxis.single(),
            counts=(count,),
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
        chunks = held[context.rank]
        keys = keys_of_chunks(chunks, lengths, causal=causal, items=items)
        batches, calls = _calls(chunks, keys, causal=causal, window=window, device=torch.device(device), items=items)
        in_order = len(calls) <= 1 and sum(call.chunks * call.queries for call in calls) == used
        query_index = key_index = inverse_index = None
        if not in_order or context.size > 1:
            query_index, inverse_index = queries_of(chunks, batches, calls)
            key_index = (
                query_index
                if context.size == 1
                else keys_of(gathered_rows(held, lengths), chunks, batches, calls, keys=keys, lengths=lengths)
            )
            query_index, key_index, inverse_index = (
                query_index.to(device),
                key_index.to(device),
                inverse_index.to(device),
            )
        return cls(
            causal=causal,
            rows=total,
            used=used,
            held=used,
            calls=calls,
            query_index=query_index,
            key_index=key_index,
            inverse_index=inverse_index,
            context=context,
            counts=counts,
        )


def _calls(
    chunks: Sequence[Chunk],
    keys: Sequence[int],
    *,
    causal: bool,
    device: torch.device,
    window: int = 0,
    items: Sequence[Spans] = (),
) -> tuple[list[list[int]], tuple[Call, ...]]:
    """Return which chunks share a call, and the calls."""
    cost = CALL_COSTS["cpu" if device.type == "cpu" else "cuda"]
    batches = batch(chunks, keys, causal=causal, cost=cost, window=window)
    return batches, tuple(
        call_of(
            [chunks[i] for i in each],
            [keys[i] for i in each],
            causal=causal,
            window=window,
            device=device,
            items=items,
        )
        for each in batches
    )
