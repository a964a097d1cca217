"""Which part of a dataset each sample of a run is taken from, and which of the part's own stream it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from mimo.data.order.shares import Shares

_MIXTURE = 2**62
"""Beside the numbers of parts, which are smaller, in keys."""


@attrs.frozen(kw_only=True)
class Segment:
    """Positions over which shares stay the same.

    Args:
        first: of them; the segment reaches to the first of the next one.
        shares: of parts.
        before: how many samples of each part the segments before this one have taken.
    """

    first: int
    shares: Shares
    before: tuple[int, ...]


@attrs.frozen(kw_only=True, eq=False)
class Draws:
    """Consecutive positions, and where each is read.

    Args:
        parts: ``[positions]`` number of the part.
        places: ``[positions]`` position in the part's own stream.
    """

    parts: NDArray[np.int64]
    places: NDArray[np.int64]


class Mixture:
    """Takes samples from parts by their shares: in each period exactly so many from each, in an order of its own.

    How often a part was taken from before any position is a product and a count within one period. So nothing needs
    to be saved, and where shares change, each part resumes where it was.

    Args:
        changes: position from which shares hold, ascending from 0, and the shares.
        seed: of the run.
    """

    def __init__(self, changes: Sequence[tuple[int, Shares]], seed: int) -> None:
        self._seed = seed
        # Only saves work: steps usually ask for the same period again. What it holds never shows in a result.
        self._latest: tuple[tuple[int, int], NDArray[np.uint32]] | None = None
        (_, shares), *_ = changes
        self._segments = [Segment(first=0, shares=shares, before=(0,) * len(shares.counts))]
        for first, shares in changes[1:]:
            before = tuple(self._taken(self._segments[-1], first))
            self._segments.append(Segment(first=first, shares=shares, before=before))

    def read(self, first: int, count: int) -> Draws:
        """Return where ``count`` positions from ``first`` on are read."""
        parts, places = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
        for segment, begin, end in self._pieces(first, first + count):
            here = self._parts(segment, begin)[(begin - segment.first) % segment.shares.period :][: end - begin]
            taken = self._taken(segment, begin)
            piece = slice(begin - first, end - first)
            parts[piece] = here
            for part in np.unique(here).tolist():
                drawn = np.flatnonzero(here == part)
                places[piece][drawn] = taken[part] + np.arange(len(drawn))
        return Draws(parts=parts, places=places)

    def _pieces(self, first: int, end: int) -> Iterator[tuple[Segment, int, int]]:
        """Yield positions cut where a segment or one of its periods ends."""
        ends = [*(segment.first for segment in self._segments[1:]), end]
        for segment, stop in zip(self._segments, ends, strict=True):
            begin, last, period = max(first, segment.first), min(end, stop), segment.shares.period
            while begin < last:
                close = min(last, begin + period - (begin - segment.first) % period)
                yield segment, begin, close
                begin = close

    def _taken(self, segment: Segment, position: int) -> list[int]:
        """Return how many samples of each part were taken before a position of a segment, or its end."""
        periods, offset = divmod(position - segment.first, segment.shares.period)
        counts = segment.shares.counts
        rests = np.bincount(self._parts(segment, position)[:offset] if offset else [], minlength=len(counts)).tolist()
        return [
            before + periods * count + rest for before, count, rest in zip(segment.before, counts, rests, strict=True)
        ]

    def _parts(self, segment: Segment, position: int) -> NDArray[np.uint32]:
        """Return the parts of the period in which a position lies."""
        key = segment.first, (position - segment.first) // segment.shares.period
        if self._latest is None or self._latest[0] != key:
            self._latest = key, segment.shares.parts(self._seed, _MIXTURE, *key)
        return self._latest[1]
