"""Samples of a step put into microbatches of so many tokens for each language lane, as few as can quickly be had."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_GROWTH = 5, 4
"""Each number of microbatches is at most so many times the one before, but for the first two."""


def microbatch_numbers(*, batch_tokens: int, micro_tokens: int, lanes: int) -> tuple[int, ...]:
    """Return how many microbatches a step may have: a few numbers, ascending, of which the last suffices for any step.

    The first suffices where all are full; the others are the next one and then a quarter more each time. Of two bins
    that `fill` leaves, or of neighbours where it keeps the order, both together have more tokens than one holds, so
    that there are less than twice as many as full ones would be.

    Args:
        batch_tokens: of a step at most.
        micro_tokens: of a microbatch for each language lane at most.
        lanes: of the language model.
    """
    full = -(-batch_tokens // micro_tokens)
    least, most = -(-full // lanes), -(-(2 * full - 1) // lanes)
    found = [least]
    while found[-1] < most:
        found.append(min(max(found[-1] + 1, found[-1] * _GROWTH[0] // _GROWTH[1] if len(found) > 1 else 0), most))
    return tuple(found)


def fill(rows: Sequence[int], *, most_rows: int, in_order: bool) -> NDArray[np.int64]:
    """Return the bin ``[N]`` of each of N samples, so that none has more than ``most_rows``.

    Best fit decreasing: the longest go first, each to the fullest bin that has room for it, a new one where none has
    (D. S. Johnson, Near-optimal bin packing algorithms, MIT 1973): at most 11/9 of the least number of bins and one
    more. In order: each goes to the last bin, or a new one.

    Args:
        rows: of each sample, of each at most ``most_rows``.
        most_rows: of a bin.
        in_order: whether bins have neighbours.
    """
    found = np.zeros(len(rows), dtype=np.int64)
    bins = 0
    rooms: list[tuple[int, int]] = []  # ascending: what a bin has room for, and its number, the first ones last
    for place in range(len(rows)) if in_order else sorted(range(len(rows)), key=lambda place: -rows[place]):
        size = int(rows[place])
        assert size <= most_rows, (size, most_rows)
        at = bisect.bisect_left(rooms, (size, -bins))
        if at == len(rooms):
            room, number = most_rows, -bins
            bins += 1
            if in_order:
                rooms.clear()
        else:
            room, number = rooms.pop(at)
        found[place] = -number
        bisect.insort(rooms, (room - size, number))
    return found
