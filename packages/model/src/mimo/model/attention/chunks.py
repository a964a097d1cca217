"""Which rows of packed segments each context rank holds, and which rows these look at. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TypeAlias

import attrs

from mimo.topology import context_spans

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


def keys_of_chunks(
    chunks: Sequence[Chunk], lengths: Sequence[int], *, causal: bool, items: Sequence[Spans] = ()
) -> list[int]:
    """Return how many rows of its segment, the first ones, each chunk's rows look at in all.

    ``items`` of each segment, or none, are seen whole by their rows, also where causal attention would end before.
    """
    if not causal:
        return [lengths[chunk.segment] for chunk in chunks]
    inside = [chunk.items(items[chunk.segment]) if items else () for chunk in chunks]
    return [max([chunk.stop, *(high for _, high in spans)]) for chunk, spans in zip(chunks, inside, strict=True)]


@attrs.frozen
class Cut:
    """The rows of one rank, and what they look at: chunks of segments, one after the other.

    Args:
        chunks: in the order in which the rank holds their rows.
        keys: how many rows of its segment, the first ones, each looks at in all.
        lengths: how many rows of each segment there are to be looked at.
        causal: whether a row sees only itself, earlier rows of its segment, and its item.
        window: of these, how many it sees at most, itself among them; 0 for all.
        items: of each segment, or none.
    """

    chunks: Sequence[Chunk]
    keys: Sequence[int]
    lengths: Sequence[int]
    causal: bool
    window: int
    items: Sequence[Spans]

    @classmethod
    def of(
        cls,
        chunks: Sequence[Chunk],
        lengths: Sequence[int],
        *,
        causal: bool,
        window: int = 0,
        items: Sequence[Spans] = (),
    ) -> Cut:
        """Return what these chunks of segments look at."""
        keys = keys_of_chunks(chunks, lengths, causal=causal, items=items)
        return cls(chunks, keys, lengths, causal, window, items)

    @cached_property
    def rows(self) -> int:
        """How many rows this rank has."""
        return sum(chunk.rows for chunk in self.chunks)

    @cached_property
    def has_items(self) -> bool:
        """Whether any row sees later rows of its item."""
        return any(self.items) and any(chunk.items(self.items[chunk.segment]) for chunk in self.chunks)
