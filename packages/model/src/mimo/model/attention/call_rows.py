"""Which packed row each query and each key of the kernel calls of attention is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from mimo.model.attention.calls import Call
from mimo.model.attention.chunks import Chunk, Cut


def queries_of(
    chunks: Sequence[Chunk], batches: Sequence[Sequence[int]], calls: Sequence[Call]
) -> tuple[Tensor, Tensor]:
    """Return the packed row that each query of the calls is, and the other way round."""
    table = torch.tensor([(chunk.start, chunk.stop) for chunk in chunks], dtype=torch.long).view(-1, 2)
    ends = (table[:, 1] - table[:, 0]).cumsum(0)
    inverse_index = torch.empty(int(ends[-1]) if len(ends) else 0, dtype=torch.long)
    pieces, offset = [torch.empty(0, dtype=torch.long)], 0
    for each, call in zip(batches, calls, strict=True):
        start, stop = table[each].split(1, 1)
        first = start if call.start is None else call.start
        at = first + torch.arange(call.queries)
        inside = (at >= start) & (at < stop)
        # Padding takes the place of its chunk's first or last row: finite, never read, so without gradient.
        packed = ends[each].unsqueeze(1) - stop + at.clamp(start, stop - 1)
        size = call.chunks * call.queries
        inverse_index[packed[inside]] = (torch.arange(size).view(call.chunks, -1) + offset)[inside]
        pieces.append(packed.flatten())
        offset += size
    return torch.cat(pieces), inverse_index


def gathered_rows(held: Sequence[Sequence[Chunk]], lengths: Sequence[int]) -> Tensor:
    """Return for each row of the segments where it is among all ranks' used rows, one rank after the other."""
    firsts = torch.tensor([0, *lengths], dtype=torch.long).cumsum(0)
    chunks = [chunk for each in held for chunk in each]
    table = torch.tensor([(chunk.segment, chunk.start, chunk.rows) for chunk in chunks], dtype=torch.long).view(-1, 3)
    segment, start, rows = table.unbind(1)
    order = torch.arange(sum(lengths))
    gathered = torch.empty_like(order)
    gathered[order + (firsts[segment] + start - rows.cumsum(0) + rows).repeat_interleave(rows)] = order
    return gathered


def keys_of(
    gathered: Tensor,
    chunks: Sequence[Chunk],
    batches: Sequence[Sequence[int]],
    calls: Sequence[Call],
    *,
    keys: Sequence[int],
    lengths: Sequence[int],
) -> Tensor:
    """Return the row that each key of the calls is, where row i of the segments is row ``gathered[i]``.

    A chunk that looks at fewer ``keys`` than its call has is filled up with its last one, which a mask hides.
    """
    firsts = torch.tensor([0, *lengths], dtype=torch.long).cumsum(0)
    pieces = [gathered[:0]]
    for each, call in zip(batches, calls, strict=True):
        last = torch.tensor([keys[i] for i in each]).unsqueeze(1) - 1
        first = firsts[torch.tensor([chunks[i].segment for i in each])].unsqueeze(1)
        pieces.append(gathered[first + torch.arange(call.keys).minimum(last)].flatten())
    return torch.cat(pieces)


def chunk_keys(gathered: Tensor, cut: Cut) -> Tensor:
    """Return the row that each row is which the chunks look at, one chunk after the other."""
    firsts = [0, *accumulate(cut.lengths)]
    spans = [
        gathered[firsts[chunk.segment] : firsts[chunk.segment] + count]
        for chunk, count in zip(cut.chunks, cut.keys, strict=True)
    ]
    return torch.cat([gathered[:0], *spans])
