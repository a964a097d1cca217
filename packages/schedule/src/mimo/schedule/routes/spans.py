"""Spans of rows, and the rows that a tensor holds: the arithmetic of routes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

Span = tuple[int, int]
"""Rows ``start .. stop``."""


class Rows:
    """Ascending rows of an edge, which lie one after the other in a tensor."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.spans = merged(spans)
        self._starts = [start for start, _ in self.spans]
        self._firsts = [0, *accumulate(stop - start for start, stop in self.spans)]

    def __len__(self) -> int:
        return self._firsts[-1]

    def offset(self, row: int) -> int:
        """Return where a row lies in the tensor."""
        index = bisect_right(self._starts, row) - 1
        return self._firsts[index] + row - self._starts[index]

    def run(self, row: int) -> Span:
        """Return where a row lies in the tensor, and the row of the edge before which its neighbours end."""
        index = bisect_right(self._starts, row) - 1
        start, stop = self.spans[index]
        return self._firsts[index] + row - start, stop

    def slice(self, start: int, stop: int) -> list[Span]:
        """Return the rows that lie at ``start .. stop`` in the tensor."""
        spans = []
        index = bisect_right(self._firsts, start) - 1
        while start < stop:
            end = min(stop, self._firsts[index + 1])
            shift = self._starts[index] - self._firsts[index]
            spans.append((start + shift, end + shift))
            start, index = end, index + 1
        return spans

    def share(self, count: int, number: int) -> list[Span]:
        """Return the even share of one of ``count`` ranks."""
        if count == 1:
            return self.spans
        share, more = divmod(len(self), count)
        start = number * share + min(number, more)
        return self.slice(start, start + share + (number < more))

    def shares(self, low: int, high: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Cut neighbouring rows where the even shares of ``count`` ranks end: number of the rank, start and stop."""
        share, more = divmod(len(self), count)
        position = self.offset(low)
        while low < high:
            rank = (
                position // (share + 1)
                if position < more * (share + 1)
                else more + (position - more * (share + 1)) // share
            )
            end = (rank + 1) * share + min(rank + 1, more)
            stop = min(high, low + end - position)
            yield rank, low, stop
            low, position = stop, end


def even_shares(start: int, stop: int, count: int) -> list[Span]:
    """Cut ``start .. stop`` into ``count`` even shares, the first ones longer by one."""
    share, more = divmod(stop - start, count)
    bounds = [start + number * share + min(number, more) for number in range(count + 1)]
    return list(pairwise(bounds))


def merged(spans: Iterable[Span]) -> list[Span]:
    """Join ascending spans that touch, and leave empty ones out."""
    result: list[Span] = []
    for start, stop in spans:
        if result and result[-1][1] == start:
            result[-1] = result[-1][0], stop
        elif start < stop:
            result.append((start, stop))
    return result


def count(spans: Iterable[Span]) -> int:
    """Return how many rows spans have."""
    return sum(stop - start for start, stop in spans)


def shifted(spans: Sequence[Span], first: int) -> Sequence[Span]:
    """Return spans relative to row ``first``."""
    return [(start - first, stop - first) for start, stop in spans] if first else spans


def clipped(spans: Sequence[Span], within: Span) -> tuple[int, tuple[Span, ...]]:
    """Return how many of the rows lie before a span, and those within it."""
    low, high = within
    before = count((start, min(stop, low)) for start, stop in spans if start < low)
    return before, tuple(
        (max(start, low), min(stop, high)) for start, stop in spans if max(start, low) < min(stop, high)
    )
