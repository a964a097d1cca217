"""Where the segments of packed rows lie, and which rows each kernel call of attention asks and sees.

Worked out once for a microbatch, it serves all layers. Segments of one length (causal: chunks of about one, padded
where no row looks) become one batched call.
Shapes: T rows of this rank, G rows of all context ranks without padding; in one call C chunks of segments, Q rows of
each, which look at L rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import attrs
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from mimo.model.runtime._chunks import Chunk, batch, cut_rows, cut_segments
from mimo.model.runtime._context import ContextAxis

_PIECES = 4  # of a masked call at most: over two ranks one computes a quarter more than is looked at, four a sixteenth
_PIECE = 128  # queries of each at least, for the kernel to be quick


@attrs.frozen(eq=False)
class Piece:
    """Some queries of a call, the keys that they look at, and the mask where the kernel needs one."""

    queries: slice
    keys: slice
    mask: Tensor | None = None


@attrs.frozen(eq=False)
class Call:
    """``chunks`` C of ``queries`` Q that look at ``keys`` L each, run at once or piece by piece."""

    chunks: int
    queries: int
    keys: int
    pieces: tuple[Piece, ...]


@attrs.frozen(kw_only=True, eq=False)
class Segments:
    """Where the segments of packed rows lie; make it with `Segments.of`, `sliced` or `continued`.

    Args:
        causal: whether a row sees only itself and earlier rows of its segment.
        rows: rows of this rank, T, the padding at the end included.
        used: of these, rows that belong to a segment.
        held: rows whose keys this rank hands to `attend`; more than ``used`` where some came before.
        calls: for each kernel call its shape.
        asks: [sum of C·Q] packed row that each query of the calls is; None when the order is the packed one.
        sees: [sum of C·L] row of T, with several context ranks of G, that each key of the calls is; None likewise.
        back: [used] row of the calls that holds each packed row; None likewise.
        context: over which the rows are split.
        counts: used rows of each context rank.
    """

    causal: bool
    rows: int
    used: int
    held: int
    calls: tuple[Call, ...]
    asks: Tensor | None
    sees: Tensor | None
    back: Tensor | None
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
    ) -> Segments:
        """Return the segments of these lengths, 0 included, one after the other.

        Args:
            lengths: rows of each segment, on all context ranks together.
            causal: whether a row sees only itself and earlier rows of its segment.
            window: of these, how many it sees at most, itself among them; 0 for all.
            rows: T, where padding at the end follows the last segment.
            device: where attention will run.
            context: where several ranks each hold `mimo.topology.context_spans` of every segment.
        """
        context = context or ContextAxis.single()
        assert causal or not window, "a window looks back"
        held = cut_segments(lengths, size=context.size)
        return cls._of(held, lengths, causal=causal, window=window, rows=rows, device=device, context=context)

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
    def continued(cls, rows: int, *, before: int, window: int = 0, device: torch.device | str = "cpu") -> Segments:
        """Return the last ``rows`` of one causal segment, of which ``before`` came earlier and have only keys now.

        Args:
            rows: T, at least one.
            before: how many keys and values stand before theirs.
            window: how many rows each sees at most, itself among them; 0 for all.
            device: where attention will run.
        """
        held = before + rows
        if rows == 1:  # sees all that is left, for which no kernel needs a mask
            seen = slice(max(0, held - window) if window else 0, held)
            call = Call(1, 1, held, (Piece(slice(1), seen),))
        else:
            call = _call([Chunk(0, before, held)], [held], causal=True, window=window, device=torch.device(device))
        return cls(
            causal=rows > 1,
            rows=rows,
            used=rows,
            held=held,
            calls=(call,),
            asks=None,
            sees=None,
            back=None,
            context=ContextAxis.single(),
            counts=(rows,),
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
    ) -> Segments:
        counts = tuple(sum(chunk.rows for chunk in each) for each in held)
        used = counts[context.rank]
        total = used if rows is None else rows
        assert used <= total, f"{used} rows of segments in {total}"
        chunks = held[context.rank]
        batches = batch(chunks, lengths, causal=causal)
        calls = tuple(
            _call([chunks[i] for i in each], lengths, causal=causal, window=window, device=torch.device(device))
            for each in batches
        )
        in_order = len(calls) <= 1 and sum(call.chunks * call.queries for call in calls) == used
        asks = sees = back = None
        if not in_order or context.size > 1:
            asks, back = _asks(chunks, batches, calls, causal=causal)
            sees = asks if context.size == 1 else _sees(held, context.rank, batches, calls, lengths, causal=causal)
            asks, sees, back = asks.to(device), sees.to(device), back.to(device)
        return cls(
            causal=causal,
            rows=total,
            used=used,
            held=used,
            calls=calls,
            asks=asks,
            sees=sees,
            back=back,
            context=context,
            counts=counts,
        )


def _call(chunks: Sequence[Chunk], lengths: Sequence[int], *, causal: bool, window: int, device: torch.device) -> Call:
    if not causal:
        queries, keys = chunks[0].rows, lengths[chunks[0].segment]
        return Call(len(chunks), queries, keys, (Piece(slice(queries), slice(keys)),))
    keys = max(chunk.stop for chunk in chunks)
    queries = keys - min(chunk.start for chunk in chunks)
    if 0 < window < keys:
        return Call(len(chunks), queries, keys, _pieces(queries, keys, window, device))
    if queries == keys:
        return Call(len(chunks), queries, keys, (Piece(slice(queries), slice(keys)),))
    if device.type == "cuda":  # flash attention knows this mask without being given one
        mask = causal_lower_right(queries, keys)
        return Call(len(chunks), queries, keys, (Piece(slice(queries), slice(keys), mask),))
    return Call(len(chunks), queries, keys, _pieces(queries, keys, keys, device))


def _pieces(queries: int, keys: int, window: int, device: torch.device) -> tuple[Piece, ...]:
    """Return the last ``queries`` of ``keys`` rows in pieces, each of which sees at most ``window`` rows back.

    To a kernel a masked pair costs as much as any other. Pieces leave out most of those: they are `_PIECES`, or as many
    to a window.
    """
    count = max(1, queries // max(_PIECE, min(queries, window) // _PIECES))
    cuts = [keys - queries + queries * piece // count for piece in range(count + 1)]
    pieces = []
    for start, stop in pairwise(cuts):
        first = max(0, start - window + 1)  # row ``start`` sees none before it
        seen = torch.ones(stop - start, stop - first, dtype=torch.bool, device=device)
        mask = seen.tril(start - first).triu(start - first - window + 1)
        pieces.append(Piece(slice(start - keys + queries, stop - keys + queries), slice(first, stop), mask))
    return tuple(pieces)


def _asks(
    chunks: Sequence[Chunk], batches: Sequence[Sequence[int]], calls: Sequence[Call], *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the packed row that each query of the calls is, and the other way round."""
    table = torch.tensor([(chunk.start, chunk.stop) for chunk in chunks], dtype=torch.long).view(-1, 2)
    ends = (table[:, 1] - table[:, 0]).cumsum(0)
    back = torch.empty(int(ends[-1]) if len(ends) else 0, dtype=torch.long)
    pieces, offset = [torch.empty(0, dtype=torch.long)], 0
    for each, call in zip(batches, calls, strict=True):
        start, stop = table[each].split(1, 1)
        first = call.keys - call.queries if causal else start
        at = first + torch.arange(call.queries)
        inside = (at >= start) & (at < stop)
        # Padding asks as its chunk's first or last row: finite, never kept, so without gradient.
        packed = ends[each].unsqueeze(1) - stop + at.clamp(start, stop - 1)
        size = call.chunks * call.queries
        back[packed[inside]] = (torch.arange(size).view(call.chunks, -1) + offset)[inside]
        pieces.append(packed.flatten())
        offset += size
    return torch.cat(pieces), back


def _sees(
    held: Sequence[Sequence[Chunk]],
    rank: int,
    batches: Sequence[Sequence[int]],
    calls: Sequence[Call],
    lengths: Sequence[int],
    *,
    causal: bool,
) -> Tensor:
    """Return the row that each key of the calls is, among all ranks' used rows one rank after the other."""
    firsts = torch.tensor([0, *lengths], dtype=torch.long).cumsum(0)
    chunks = [chunk for each in held for chunk in each]
    table = torch.tensor([(chunk.segment, chunk.start, chunk.rows) for chunk in chunks], dtype=torch.long).view(-1, 3)
    segment, start, rows = table.unbind(1)
    order = torch.arange(sum(lengths))
    gathered = torch.empty_like(order)
    gathered[order + (firsts[segment] + start - rows.cumsum(0) + rows).repeat_interleave(rows)] = order
    pieces = [order[:0]]
    for each, call in zip(batches, calls, strict=True):
        own = [held[rank][i] for i in each]
        last = torch.tensor([chunk.stop if causal else call.keys for chunk in own]).unsqueeze(1) - 1
        first = firsts[torch.tensor([chunk.segment for chunk in own])].unsqueeze(1)
        pieces.append(gathered[first + torch.arange(call.keys).minimum(last)].flatten())
    return torch.cat(pieces)
