"""Which rows of packed segments each context rank holds, and in how few kernel calls they can attend. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import attrs

from mimo.topology import context_spans

_LIKE = 0.75**2  # a causal chunk joins a call whose padded area it fills this far …
_SHORT = 32  # … or one that looks at so few rows that another call would cost more than the padding

Spans: TypeAlias = Sequence[tuple[int, int]]
"""Of a segment, the rows ``start`` .. ``stop`` of each of its items; ascending, and none in two of them."""


@attrs.frozen
class Chunk:
    """Rows ``start`` .. ``stop`` of a segment, held by one rank; never empty."""

    segment: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """How many they are."""
        return self.stop - self.start

    @property
    def area(self) -> int:
        """Pairs of a row and a row before it or in the chunk."""
        return self.rows * self.stop

    def items(self, spans: Spans) -> Spans:
        """Return those of several rows of which this chunk has some."""
        return [(low, high) for low, high in spans if high - low > 1 and low < self.stop and self.start < high]


def cut_segments(lengths: Sequence[int], *, size: int) -> list[list[Chunk]]:
    """Return what each of ``size`` ranks holds where every segment is cut as `context_spans` says."""
    return [
        [
            Chunk(segment, *span)
            for segment, length in enumerate(lengths)
            for span in context_spans(length, size=size, rank=rank)
        ]
        for rank in range(size)
    ]


def cut_rows(lengths: Sequence[int], *, rows: int, size: int) -> list[list[Chunk]]:
    """Return what each of ``size`` ranks holds where the packed rows are cut into slices of ``rows``."""
    held: list[list[Chunk]] = [[] for _ in range(size)]
    first = 0
    for segment, length in enumerate(lengths):
        at = 0
        while at < length:
            rank = (first + at) // rows
            stop = min(length, (rank + 1) * rows - first)
            held[rank].append(Chunk(segment, at, stop))
            at = stop
        first += length
    return held


def batch(
    chunks: Sequence[Chunk], lengths: Sequence[int], *, causal: bool, items: Sequence[Spans] = ()
) -> list[list[int]]:
    """Return which of ``chunks`` share a kernel call, ascending in each.

    A causal call is as long as its longest chunk, and reaches back as far as its earliest; full attention has no mask
    that would hide padding, so there all look at equally many rows. A chunk with rows of ``items``, which each segment
    has or none, is a causal call by itself.
    """
    if not causal:
        calls_of_shape: dict[tuple[int, int], list[int]] = {}
        for index, chunk in enumerate(chunks):
            calls_of_shape.setdefault((lengths[chunk.segment], chunk.rows), []).append(index)
        return [calls_of_shape[shape] for shape in sorted(calls_of_shape, reverse=True)]
    alone = {index for index, chunk in enumerate(chunks) if items and chunk.items(items[chunk.segment])}
    calls: list[list[int]] = []
    start = stop = least = 0
    for index in sorted(set(range(len(chunks))) - alone, key=lambda i: (-chunks[i].stop, -chunks[i].start)):
        chunk = chunks[index]
        earliest, smallest = min(start, chunk.start), min(least, chunk.area)
        if calls and (smallest >= _LIKE * (stop - earliest) * stop or stop <= _SHORT):
            calls[-1].append(index)
            start, least = earliest, smallest
        else:
            calls.append([index])
            start, stop, least = chunk.start, chunk.stop, chunk.area
    return [*(sorted(call) for call in calls), *([index] for index in sorted(alone))]
