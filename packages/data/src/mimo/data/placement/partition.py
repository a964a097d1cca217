"""Numbers put into bins so that the fullest is as low as can quickly be had.

Longest processing time first: the costliest goes first, each to the bin that has least (R. L. Graham, Bounds on
multiprocessing timing anomalies, SIAM J. Appl. Math. 17, 1969: never more than 4/3 - 1/(3 bins) of the best). What is
left of the difference is then taken out between the fullest bin and others, by moving one thing or exchanging two.
All is in whole numbers, ties go to the lowest number: every platform finds the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Whole = NDArray[np.int64]
_NEIGHBOURS = 8
"""With so many of the bins that have least, the fullest exchanges something."""


def partition(costs: Whole, rows: Whole, bins: int, *, most_rows: int, rounds: int = 0) -> Whole | None:
    """Return the bin ``[N]`` of each thing; None where no way was found that keeps within ``most_rows``.

    Args:
        costs: ``[N]``, from 0 on.
        rows: ``[N]``.
        bins: how many there are.
        most_rows: that a bin may hold.
        rounds: how often the fullest bin is relieved at most.
    """
    order = np.argsort(-costs, kind="stable").tolist()
    chosen = [0] * len(order)
    if not _fill(order, costs.tolist(), rows.tolist(), [(0, index, 0) for index in range(bins)], chosen, most_rows):
        return None
    found = np.array(chosen, dtype=np.int64)
    relieve(costs, rows, found, bins, most_rows=most_rows, rounds=rounds)
    return found


def _fill(
    order: Sequence[int],
    costs: Sequence[int],
    rows: Sequence[int],
    heap: list[tuple[int, int, int]],
    chosen: list[int],
    most_rows: int,
) -> bool:
    """Put things in order into the bins that have least; a bin is its load, its number and its rows."""
    heapq.heapify(heap)
    for thing in order:
        cost, size = costs[thing], rows[thing]
        load, index, held = heap[0]
        if held + size <= most_rows:
            chosen[thing] = index
            heapq.heapreplace(heap, (load + cost, index, held + size))
            continue
        passed = []
        while heap and heap[0][2] + size > most_rows:
            passed.append(heapq.heappop(heap))
        if not heap:
            return False
        load, index, held = heap[0]
        chosen[thing] = index
        heapq.heapreplace(heap, (load + cost, index, held + size))
        for one in passed:
            heapq.heappush(heap, one)
    return True


def relieve(costs: Whole, rows: Whole, bins_of: Whole, bins: int, *, most_rows: int, rounds: int) -> None:
    """Lower the fullest bin, up to ``rounds`` times, by the exchange with another that leaves the two lowest.

    Changes ``bins_of``. It ends where nothing lowers the fullest bin.
    """
    if not len(costs):
        return
    loads = np.bincount(bins_of, weights=costs, minlength=bins).astype(np.int64)
    held = np.bincount(bins_of, weights=rows, minlength=bins).astype(np.int64)
    mean = -(-int(loads.sum()) // bins)
    for _ in range(rounds):
        full = int(loads.argmax())
        if loads[full] <= mean:
            return
        own = np.flatnonzero(bins_of == full)
        near = np.argsort(loads, kind="stable")[: min(_NEIGHBOURS, bins - 1)]
        others = np.flatnonzero(np.isin(bins_of, near[near != full]))
        # What moves away from the fullest: a thing alone, or one for another; the last column stands for nothing.
        given = np.append(costs[others], [0])
        taken_rows = np.append(rows[others], [0])
        lightest = int(loads.argmin())
        where = np.append(bins_of[others], [lightest])
        shift = costs[own][:, None] - given[None, :]
        heavier = rows[own][:, None] - taken_rows[None, :]
        after = np.maximum(loads[full] - shift, loads[where][None, :] + shift)
        fits = (held[where][None, :] + heavier <= most_rows) & (held[full] - heavier <= most_rows)
        after = np.where(fits, after, loads[full])
        best = int(after.argmin())
        if after.flat[best] >= loads[full]:
            return
        mine, other = divmod(best, len(where))
        target = int(where[other])
        change, size = int(shift[mine, other]), int(heavier[mine, other])
        bins_of[own[mine]] = target
        if other < len(others):
            bins_of[others[other]] = full
        loads[full] -= change
        loads[target] += change
        held[full] -= size
        held[target] += size


def partition_near(
    costs: Whole, rows: Whole, homes: Sequence[Sequence[int]], bins: int, *, most_rows: int, rounds: int
) -> Whole | None:
    """Return the bin of each thing as `partition` does, most of them at home where that costs nothing.

    The fullest bin that `partition` finds sets the limit. The costliest first, a thing stays with the home that has
    least as long as that keeps within the limit; the others are put where least is. Where the fullest is above the
    limit then, all go where `partition` puts them.

    Args:
        costs: ``[N]``, from 0 on.
        rows: ``[N]``.
        homes: of each thing, bins that it need not travel to; none is legal.
        bins: how many there are.
        most_rows: that a bin may hold.
        rounds: see `partition`.
    """
    plain = partition(costs, rows, bins, most_rows=most_rows, rounds=rounds)
    if plain is None or not any(homes):
        return plain
    limit = int(np.bincount(plain, weights=costs, minlength=bins).max(initial=0))
    numbers, sizes = costs.tolist(), rows.tolist()
    loads, held, chosen, left = [0] * bins, [0] * bins, [0] * len(numbers), list[int]()
    for thing in np.argsort(-costs, kind="stable").tolist():
        home = min(homes[thing], key=loads.__getitem__, default=-1)
        if home < 0 or loads[home] + numbers[thing] > limit or held[home] + sizes[thing] > most_rows:
            left.append(thing)
            continue
        chosen[thing] = home
        loads[home] += numbers[thing]
        held[home] += sizes[thing]
    heap = [(loads[index], index, held[index]) for index in range(bins)]
    if not _fill(left, numbers, sizes, heap, chosen, most_rows):
        return plain
    found = np.array(chosen, dtype=np.int64)
    if int(np.bincount(found, weights=costs, minlength=bins).max(initial=0)) > limit:
        relieve(costs, rows, found, bins, most_rows=most_rows, rounds=rounds)
    return found if int(np.bincount(found, weights=costs, minlength=bins).max(initial=0)) <= limit else plain
