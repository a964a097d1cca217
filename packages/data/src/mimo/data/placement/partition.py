"""Things put into bins so that the fullest is as low as can quickly be had.

Longest processing time first: the costliest go first, each to the bin that has least (R. L. Graham, Bounds on
multiprocessing timing anomalies, SIAM J. Appl. Math. 17, 1969). Here a whole round of as many things as there are bins
goes at once, the costliest of it to the bin that has least, so that numpy does the work. Then each bin that is too full
is paired with an emptier one, and they exchange the two things, or move the one, that leave both most even, again and
again, as G. Finn and E. Horowitz do with the fullest and the emptiest (A linear time approximation algorithm for
multiprocessor scheduling, BIT 19, 1979).

All is in whole numbers, ties go to the lowest number: every platform finds the same. B bins, K things of a bin, N of
all.
"""

from __future__ import annotations

import heapq
from math import gcd
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mimo.data.placement.ordering import ascending, firsts_of, grouped

Whole = NDArray[np.int64]
_NONE = -1
"""Stands for no thing in a bin; as the last of what costs have, it costs nothing."""
_SPARE = 2
"""Places that bins have free when exchanging begins."""
_WIDTH = 24
"""Of each bin, so many of its least costly things are exchanged."""
_MISSES = 4
"""After so many rounds in which hardly any pair could do better exchanging ends."""
_FEW = 8
"""Hardly any are less than one in so many."""
_FINE = 10
"""Bins that have no more than 2^-10 above the average are full as they should be."""


def partition(
    costs: Whole, rows: Whole, bins: int, *, most_rows: int, rounds: int, spare: int = _SPARE
) -> Whole | None:
    """Return the bin ``[N]`` of each thing; None where no way was found that keeps within ``most_rows``.

    Args:
        costs: ``[N]``, from 0 on.
        rows: ``[N]``.
        bins: how many there are.
        most_rows: that a bin may hold.
        rounds: how often bins exchange at most.
        spare: 0 where each bin gets equally many.
    """
    if len(costs) and costs.min() == costs.max():  # there is nothing that bins could exchange
        share, more = divmod(len(costs), bins)
        found: Whole = np.repeat(np.arange(bins), share + (np.arange(bins) < more))
        held: Whole = np.bincount(found, weights=rows, minlength=bins)
    else:
        slots = _dealt(ascending(-costs), costs, bins, spare=spare)
        held = _exchange(slots, costs, rows, most_rows=most_rows, rounds=rounds)
        found = _bins_of(slots, len(costs))
    if held.max() <= most_rows:
        return found
    found = np.zeros(len(costs), dtype=np.int64)
    empty = np.zeros(bins, dtype=np.int64)
    return found if spare and _fill(ascending(-costs), costs, rows, found, empty, empty, most_rows) else None


def partition_uneven(costs: Whole, rows: Whole, before: Whole, *, most_rows: int, rounds: int) -> Whole | None:
    """Return the bin of each thing as `partition` does, where bins have something before and may have any number.

    Args:
        costs: ``[N]``, from 0 on.
        rows: ``[N]``.
        before: ``[B]`` what each bin has already.
        most_rows: that a bin may hold.
        rounds: see `partition`.
    """
    found, bins = np.zeros(len(costs), dtype=np.int64), len(before)
    if not _fill(ascending(-costs), costs, rows, found, before, np.zeros(bins, dtype=np.int64), most_rows):
        return None
    slots = _slots_of(found, costs, bins)
    _exchange(slots, costs, rows, most_rows=most_rows, rounds=rounds, before=before)
    return _bins_of(slots, len(costs))


def partition_near(costs: Whole, rows: Whole, homes: Whole, bins: int, *, most_rows: int, rounds: int) -> Whole | None:
    """Return the bin of each thing as `partition` does, most of them at home.

    The costliest first, a bin keeps what is at home there as long as it has no more than bins have on average, or than
    the costliest thing alone; the rest go to the bins that have least. Where that leaves the fullest bin more than a
    64th above this, it is compared with `partition`, and the better one is taken.

    Args:
        costs: ``[N]``, from 0 on.
        rows: ``[N]``.
        homes: ``[N]`` the bin in which a thing is at home, -1 for none.
        bins: how many there are.
        most_rows: that a bin may hold.
        rounds: see `partition`.
    """
    if not len(costs) or homes.max() < 0:
        return partition(costs, rows, bins, most_rows=most_rows, rounds=rounds)
    target = max(-(-int(costs.sum()) // bins), int(costs.max()))
    order = grouped(homes, costs)
    own = homes[order]
    first = firsts_of(own)
    stays = own >= 0
    for values, limit in ((costs, target), (rows, most_rows)):
        sums = np.cumsum(values[order])
        stays &= sums - (sums - values[order])[first] <= limit
    found = np.full(len(costs), _NONE, dtype=np.int64)
    found[order[stays]] = own[stays]
    kept, left = order[stays], np.sort(order[~stays])
    left = left[ascending(-costs[left])]
    loads, held = (
        np.bincount(found[kept], weights=one[kept], minlength=bins).astype(np.int64) for one in (costs, rows)
    )
    near = None
    if _fill(left, costs, rows, found, loads, held, most_rows):
        slots = _slots_of(found, costs, bins)
        _exchange(slots, costs, rows, most_rows=most_rows, rounds=rounds, enough=target + (target >> 6))
        near = _bins_of(slots, len(costs))
        if _fullest(near, costs, bins) <= target + (target >> 6):
            return near
    plain = partition(costs, rows, bins, most_rows=most_rows, rounds=rounds)
    if near is None or (plain is not None and _fullest(plain, costs, bins) < _fullest(near, costs, bins)):
        return plain
    return near


def _fullest(found: Whole, costs: Whole, bins: int) -> int:
    return int(np.bincount(found, weights=costs, minlength=bins).max())


def _fill(things: Whole, costs: Whole, rows: Whole, found: Whole, loads: Whole, held: Whole, most_rows: int) -> bool:
    """Put things one by one into the bin that has least and room for its rows; return whether all had room."""
    heap = list(zip(loads.tolist(), range(len(loads)), held.tolist(), strict=True))
    heapq.heapify(heap)
    chosen = []
    for cost, size in zip(costs[things].tolist(), rows[things].tolist(), strict=True):
        full = []
        while heap and heap[0][2] + size > most_rows:
            full.append(heapq.heappop(heap))
        if not heap:
            return False
        load, index, filled = heap[0]
        chosen.append(index)
        heapq.heapreplace(heap, (load + cost, index, filled + size))
        for one in full:
            heapq.heappush(heap, one)
    found[things] = chosen
    return True


def _dealt(order: Whole, costs: Whole, bins: int, *, spare: int) -> Whole:
    """Return the things of each bin ``[K, B]``, a round of this order after the other, and spare places.

    Rounds that come before the last `_WIDTH` go to and fro: they leave no two bins further apart than the costliest and
    the least costly thing of them.
    """
    deals = -(-len(order) // bins)
    slots = np.full((deals + spare, bins), _NONE, dtype=np.int64)
    early = max(deals - _WIDTH, 0)
    slots[:early] = order[: early * bins].reshape(early, bins)
    slots[1:early:2] = slots[1:early:2, ::-1].copy()
    loads: Whole = costs[slots[:early]].sum(0)
    for deal in range(early, deals):
        dealt = order[deal * bins : (deal + 1) * bins]
        takers = ascending(loads)[: len(dealt)]
        slots[deal, takers] = dealt
        loads[takers] += costs[dealt]
    return slots


def _slots_of(found: Whole, costs: Whole, bins: int) -> Whole:
    """Return the things of each bin ``[K, B]``, the costliest first, and spare places."""
    order = grouped(found, costs)
    own = found[order]
    place = np.arange(len(own)) - firsts_of(own)
    slots = np.full((int(place.max(initial=-1)) + 1 + _SPARE, bins), _NONE, dtype=np.int64)
    slots[place, own] = order
    return slots


def _stride(half: int) -> int:
    """Return by how many bins partners move on between rounds, so that each of so many meets others of any rank."""
    return next((step for step in range(half * 5 // 8, 1, -1) if gcd(step, half) == 1), 1)


def _bins_of(slots: Whole, count: int) -> Whole:
    found: Whole = np.empty(count + 1, dtype=np.int64)  # the last for places where nothing is
    found[slots] = np.arange(slots.shape[1])
    return found[:count]


def _exchange(
    slots: Whole,
    costs: Whole,
    rows: Whole,
    *,
    most_rows: int,
    rounds: int,
    enough: int = 0,
    before: Whole | Literal[0] = 0,
) -> Whole:
    """Even bins out in pairs, up to ``rounds`` times, or until the fullest has no more than ``enough``; in place.

    Returns:
        ``[B]`` the rows of each bin.
    """
    costs, rows = np.append(costs, 0), np.append(rows, 0)
    worth = costs[slots]  # [K, B]
    loads: Whole = worth.sum(0) + before
    held: Whole = rows[slots].sum(0)
    bins, half, width, misses = len(loads), len(loads) // 2, min(len(slots), _WIDTH), 0
    slots, worth, largest = slots[-width:], worth[-width:], int(rows.max())
    room: Whole = np.empty(width * width * half, dtype=np.int64)
    mean, stride = int(loads.sum()) // bins, _stride(half)
    enough = max(enough, mean + (mean >> _FINE))
    for turn in range(rounds if half else 0):
        order = ascending(loads)
        full = min(int(np.count_nonzero(loads > enough)), half)
        if not full or misses >= min(half, _MISSES):
            break
        high, low = order[: -full - 1 : -1], order[(np.arange(full) + turn * stride) % half]
        difference = loads[high] - loads[low]
        # What lies between two bins when the fuller gives one thing for another, or for none: [K x K, pairs]
        after = room[: width * width * full].reshape(width * width, -1)
        gives, gets = difference - 2 * worth.take(high, axis=1), 2 * worth.take(low, axis=1)
        np.add(gives[:, None], gets, out=after.reshape(width, width, -1))
        np.abs(after, out=after)
        better = after.min(0) < difference
        high, low, difference, after = high[better], low[better], difference[better], after.compress(better, axis=1)
        if len(high) and int(held.max()) + largest > most_rows:
            more = rows[slots.take(high, axis=1)][:, None] - rows[slots.take(low, axis=1)]
            fits = (more <= most_rows - held[low]) & (more >= held[high] - most_rows)
            np.copyto(after, difference, where=~fits.reshape(after.shape))
            better = after.min(0) < difference
            high, low, after = high[better], low[better], after.compress(better, axis=1)
        misses = 0 if len(high) * _FEW > full else misses + 1
        if not len(high):
            continue
        mine, theirs = np.divmod(after.argmin(0), width)
        given, taken = slots[mine, high], slots[theirs, low]
        slots[mine, high], slots[theirs, low] = taken, given
        worth[mine, high], worth[theirs, low] = costs[taken], costs[given]
        change, size = costs[given] - costs[taken], rows[given] - rows[taken]
        loads[high] -= change
        loads[low] += change
        held[high] -= size
        held[low] += size
    return held
