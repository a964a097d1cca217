"""Shortens a placed step by moving tasks within the orders of their actors: tabu search on the longest path.

The one idea, from job shops (Nowicki and Smutnicki, "A Fast Taboo Search Algorithm for the Job Shop Problem", 1996):
when each actor's order is given, every task starts as soon as it can, and the step takes as long as its longest path.
It can only get shorter by swapping two tasks that follow each other on that path because of an actor's order. The order
alone decides whether an actor stays within the budget.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain, pairwise

import attrs

from mimo.schedule.ahead.budget import within
from mimo.schedule.ahead.tasks import Placed, TaskGraph

_Orders = list[list[int]]
"""The tasks of each actor, in order."""
_PATIENCE = 40
"""Moves without a shorter step after which the search returns to the best orders and perturbs them."""


@attrs.frozen(kw_only=True, eq=False)
class _Times:
    """Starts of the tasks in given orders, and for each the task (``-1``: none) whose end it waits for longest."""

    starts: list[float]
    order: list[int]
    end: float
    last: int
    causes: list[int]


@attrs.frozen(kw_only=True, eq=False)
class _Move:
    """A move: the orders and times after it, and the pairs (was first, was second) that it swaps."""

    orders: _Orders
    times: _Times
    swapped: list[tuple[int, int]]


class Improver:
    """Searches for shorter orders of one step's tasks; effort is counted in tasks placed.

    Args:
        tasks: of the step.
        budget: bytes that each actor may hold; 0 for no limit.
        effort: how many tasks may be placed in total.
    """

    def __init__(self, tasks: TaskGraph, budget: int, effort: int) -> None:
        self._tasks = tasks
        self._budget = budget
        self._seconds = [task.seconds for task in tasks.tasks]
        self._actors = [task.actors for task in tasks.tasks]
        self._waits = [len(before) for before in tasks.before]
        self._direct = [{earlier for earlier, _ in before} for before in tasks.before]
        self._left = effort
        self._random = random.Random(0)

    def improve(self, placed: Placed, enough: float) -> Placed:
        """Return a placement that ends no later; the search stops when one ends by ``enough``."""
        orders: _Orders = [[] for _ in self._tasks.graph.actors]
        for number in placed.order:
            for actor in self._actors[number]:
                orders[actor].append(number)
        best = now = self._time(orders)
        best_orders = list(orders)
        tabu: dict[tuple[int, int], int] = {}
        round_ = idle = 0
        while self._left > 0 and best.end > enough:
            round_ += 1
            idle += 1
            step = self._step(now, orders, best.end, {pair for pair, until in tabu.items() if until >= round_})
            if step is not None:
                orders, now, swapped = step.orders, step.times, step.swapped
                for first, second in swapped:
                    tabu[second, first] = round_ + 7 + self._random.randrange(6)
                if now.end < best.end:
                    best, best_orders, idle = now, list(orders), 0
            if step is None or idle >= _PATIENCE:
                orders, now = self._perturbed(best_orders)
                tabu.clear()
                idle = 0
                self._left -= len(self._seconds)
        return self._tasks.placed(best.order)

    def _step(self, now: _Times, orders: _Orders, best: float, tabu: set[tuple[int, int]]) -> _Move | None:
        """Return the best move; one that swaps a pair back only if the result is the best so far."""
        best_move: _Move | None = None
        for actor, source, target in self._moves(now, orders):
            moved = self._moved(orders, actor, source, target)
            times = None if moved is None else self._place(moved)
            if moved is None or times is None or (best_move is not None and times.end >= best_move.times.end):
                continue
            swapped = _swapped(orders[actor], source, target)
            if times.end < best or not tabu.intersection(swapped):
                best_move = _Move(orders=moved, times=times, swapped=swapped)
        return best_move

    def _time(self, orders: _Orders) -> _Times:
        times = self._place(orders)
        assert times is not None, "orders contradict each other"
        return times

    def _place(self, orders: _Orders) -> _Times | None:
        """Return when the tasks start, or None if the orders contradict each other."""
        seconds, after = self._seconds, self._tasks.after
        self._left -= len(seconds)
        waits = list(self._waits)
        following: list[tuple[tuple[int, float], ...]] = [()] * len(waits)
        for own in orders:
            for first, second in pairwise(own):
                following[first] += ((second, 0),)
                waits[second] += 1
        starts: list[float] = [0] * len(waits)
        causes = [-1] * len(waits)
        free = [number for number, count in enumerate(waits) if not count]
        order: list[int] = []
        end: float = 0
        last = -1
        while free:
            number = free.pop()
            order.append(number)
            finish = starts[number] + seconds[number]
            if finish > end:
                end, last = finish, number
            for later, lag in chain(after[number], following[number]):
                if finish + lag > starts[later]:
                    starts[later], causes[later] = finish + lag, number
                waits[later] -= 1
                if not waits[later]:
                    free.append(later)
        if len(order) < len(waits):
            return None
        return _Times(starts=starts, order=order, end=end, last=last, causes=causes)

    def _moves(self, times: _Times, orders: _Orders) -> Iterator[tuple[int, int, int]]:
        """Yield moves (actor, from place, to place) within runs of the longest path on one actor."""
        path = [times.last]
        while times.causes[path[-1]] >= 0:
            path.append(times.causes[path[-1]])
        path.reverse()
        seen: set[tuple[int, int, int]] = set()
        for actor, order in enumerate(orders):
            places = {number: place for place, number in enumerate(order)}
            run: list[int] = []
            for number in [*path, -1]:
                place = places.get(number)
                if run and (place is None or place != run[-1] + 1):
                    yield from self._moves_in(actor, run, order, seen)
                    run = []
                if place is not None:
                    run.append(place)

    def _moves_in(
        self, actor: int, run: list[int], order: list[int], seen: set[tuple[int, int, int]]
    ) -> Iterator[tuple[int, int, int]]:
        pairs = [(place + 1, place) for place in run[:-1]]
        pairs += [(place, run[0]) for place in run[2:]] + [(place, run[-1]) for place in run[:-2]]
        for source, target in pairs:
            low, high = (target, source) if target < source else (source, target)
            moving = order[source]
            across = order[low:high] if target < source else order[low + 1 : high + 1]
            if target < source and any(other in self._direct[moving] for other in across):
                continue
            if target > source and any(moving in self._direct[other] for other in across):
                continue
            if (actor, source, target) not in seen:
                seen.add((actor, source, target))
                yield actor, source, target

    def _moved(self, orders: _Orders, actor: int, source: int, target: int) -> _Orders | None:
        """Return the orders after a move, on all actors of the task, or None if the budget forbids it."""
        moving = orders[actor][source]
        anchor = orders[actor][target]
        self._left -= len(orders[actor])
        result = list(orders)
        for other in self._actors[moving]:
            order = list(orders[other])
            if other == actor:
                order.insert(target, order.pop(source))
            elif other in self._actors[anchor]:
                order.remove(moving)
                order.insert(order.index(anchor) + (target > source), moving)
            else:
                continue
            if self._budget and not within(self._tasks, other, order, self._budget):
                return None
            result[other] = order
        return result

    def _perturbed(self, orders: _Orders) -> tuple[_Orders, _Times]:
        """Return the orders after a few random moves along their longest path."""
        now = self._time(orders)
        for _ in range(4):
            moves = list(self._moves(now, orders))
            self._random.shuffle(moves)
            for move in moves:
                moved = self._moved(orders, *move)
                times = None if moved is None else self._place(moved)
                if moved is not None and times is not None:
                    orders, now = moved, times
                    break
        return orders, now


def _swapped(order: list[int], source: int, target: int) -> list[tuple[int, int]]:
    """Return the pairs (was first, was second) that a move swaps."""
    moving = order[source]
    if target < source:
        return [(other, moving) for other in order[target:source]]
    return [(moving, other) for other in order[source + 1 : target + 1]]
