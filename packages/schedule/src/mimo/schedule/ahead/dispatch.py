"""Places tasks in time by a rule: when actors become free, each begins the first of its tasks that can begin.

A list schedule (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969) with two additions: the budget may delay
a task, and so may a task with a lower key that arrives before it would end (``patience``).
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Mapping, Sequence

import attrs

from mimo.schedule.ahead.budget import MemoryBudget
from mimo.schedule.ahead.tasks import Placed, TaskGraph
from mimo.topology import StageId


@attrs.frozen(kw_only=True, eq=False)
class PriorityRule:
    """How to choose among tasks.

    Args:
        keys: priority of each task, the lowest first, all different.
        patience: a task is delayed if one with a lower key arrives within this share of its time.
        limits: for some stages, the microbatches in flight, including those that wait for weight gradients; a step done
            in turns (`turns`) may have more.
    """

    keys: Sequence[int]
    patience: float = 0
    limits: Mapping[StageId, int] | None = None


def dispatch(tasks: TaskGraph, rule: PriorityRule, budget: int) -> Placed:
    """Place all tasks; ``budget`` must be no less than `smallest_budget`, or 0."""
    return _Dispatch(tasks, rule, budget).run()


class _Dispatch:
    """The state of the actors over time."""

    def __init__(self, tasks: TaskGraph, rule: PriorityRule, budget: int) -> None:
        self.tasks, self.all, self.after = tasks, tasks.tasks, tasks.after
        self.keys, self.patience = rule.keys, rule.patience
        self.memory = MemoryBudget(tasks, budget, rule.limits)
        actors = len(tasks.graph.actors)
        self.unfinished = [len(before) for before in tasks.before]
        self.unstarted = list(self.unfinished)
        self.arrival: list[float] = [0] * len(self.all)
        self.ready: list[list[tuple[int, int]]] = [[] for _ in range(actors)]
        self.coming: list[dict[int, float]] = [{} for _ in range(actors)]
        self.busy = [False] * actors
        self.until: list[float] = [0] * actors
        self.events: list[tuple[float, int, int]] = []
        self.order: list[int] = []

    def run(self) -> Placed:
        """Return the tasks as placed."""
        for number, count in enumerate(self.unfinished):
            if not count:
                self._arrive(number)
        self._begin(range(len(self.busy)), 0)
        while self.events:
            now = self.events[0][0]
            touched: set[int] = set()
            while self.events and self.events[0][0] == now:
                _, is_arrival, number = heapq.heappop(self.events)
                touched.update(self.all[number].actors)
                if is_arrival:
                    self._arrive(number)
                else:
                    self._finish(number, now, touched)
            self._begin(touched, now)
        assert len(self.order) == len(self.all), "some tasks were never begun"
        return self.tasks.placed(self.order)

    def _arrive(self, number: int) -> None:
        """Record that a task waits only for its actors and their memory."""
        for actor in self.all[number].actors:
            insort(self.ready[actor], (self.keys[number], number))
            self.coming[actor].pop(number, None)

    def _finish(self, number: int, now: float, touched: set[int]) -> None:
        task = self.all[number]
        self.memory.end(task)
        for actor in task.actors:
            self.busy[actor] = False
            for _, other in self.ready[actor]:  # an idle actor may wait for this one
                if len(self.all[other].actors) > 1:
                    touched.update(self.all[other].actors)
        for later, _ in self.after[number]:
            touched.update(self.all[later].actors)
            self.unfinished[later] -= 1
            if not self.unfinished[later]:
                if self.arrival[later] <= now:
                    self._arrive(later)
                else:
                    heapq.heappush(self.events, (self.arrival[later], 1, later))

    def _begin(self, actors: Sequence[int] | range | set[int], now: float) -> None:
        """Begin what can begin on these actors."""
        for actor in sorted(actors):
            if not self.busy[actor] and self.ready[actor]:
                number = self._choose(actor, now)
                if number is not None:
                    self._start(number, now)

    def _choose(self, actor: int, now: float) -> int | None:
        """Return the first task that an idle actor can begin and need not delay."""
        awaited = [(self.keys[number], when) for number, when in self.coming[actor].items()] if self.patience else []
        for key, number in self.ready[actor]:
            task = self.all[number]
            if len(task.actors) > 1 and any(self.busy[other] for other in task.actors):
                awaited.append((key, max(self.until[other] for other in task.actors)))
                continue
            if awaited:
                end = now + self.patience * task.seconds
                if any(other < key and when < end for other, when in awaited):
                    continue
            if self.memory.allows(task):
                return number
        return None

    def _start(self, number: int, now: float) -> None:
        task = self.all[number]
        finish = now + task.seconds
        self.order.append(number)
        self.memory.begin(task)
        for actor in task.actors:
            self.ready[actor].remove((self.keys[number], number))
            self.busy[actor] = True
            self.until[actor] = finish
        for later, lag in self.after[number]:
            self.unstarted[later] -= 1
            self.arrival[later] = max(self.arrival[later], finish + lag)
            if not self.unstarted[later] and self.patience:
                for actor in self.all[later].actors:
                    self.coming[actor][later] = self.arrival[later]
        heapq.heappush(self.events, (finish, 0, number))
