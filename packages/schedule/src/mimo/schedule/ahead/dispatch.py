"""Places tasks in time by a rule: when actors become free, each begins the first of its tasks that can begin.

A list schedule (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969) with two additions: the budget may delay
a task, and so may a task with a lower key that arrives before it would end (``patience``).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence

import attrs

from mimo.schedule.ahead.budget import MemoryBudget
from mimo.schedule.ahead.tasks import Placed, TaskGraph
from mimo.topology import StageId


@attrs.frozen(kw_only=True, eq=False)
class PriorityRule:
    """How to choose among tasks.

    Args:
        keys: the place of each task among all, counted from 0; the lowest goes first.
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


@attrs.define(eq=False)
class _Instant:
    """What happens at one time: tasks that end, and tasks for which all that they wait for has come."""

    ends: list[int] = attrs.field(factory=list)
    arrivals: list[int] = attrs.field(factory=list)


class _Dispatch:
    """The state of the actors over time.

    By actor it has the keys of tasks that are ``ready``, the numbers of those among them that have several actors
    (``joint``), and by key when tasks arrive that are ``coming``: known as soon as all that they wait for has begun.
    """

    def __init__(self, tasks: TaskGraph, rule: PriorityRule, budget: int) -> None:
        self.tasks, self.all, self.after = tasks, tasks.tasks, tasks.after
        self.keys, self.patience = rule.keys, rule.patience
        self.numbers = [0] * len(self.all)
        for number, key in enumerate(self.keys):
            self.numbers[key] = number
        self.memory = MemoryBudget(tasks, budget, rule.limits)
        actors = len(tasks.graph.actors)
        self.waits = [len(before) for before in tasks.before]
        self.arrival: list[float] = [0] * len(self.all)
        self.ready: list[list[int]] = [[] for _ in range(actors)]
        self.joint: list[set[int]] = [set() for _ in range(actors)]
        self.coming: list[dict[int, float]] = [{} for _ in range(actors)]
        self.busy = [False] * actors
        self.until: list[float] = [0] * actors
        self.times: list[float] = []
        self.instants: dict[float, _Instant] = {}
        self.order: list[int] = []

    def run(self) -> Placed:
        """Return the tasks as placed."""
        for number, count in enumerate(self.waits):
            if not count:
                self._arrive(number)
        self._begin(range(len(self.busy)), 0)
        while self.times:
            now = heapq.heappop(self.times)
            instant = self.instants.pop(now)
            touched: set[int] = set()
            for number in instant.ends:
                self._finish(number, touched)
            for number in instant.arrivals:
                touched.update(self.all[number].actors)
                self._arrive(number)
            self._begin(sorted(touched), now)
        assert len(self.order) == len(self.all), "some tasks were never begun"
        return self.tasks.placed(self.order)

    def _at(self, time: float) -> _Instant:
        instant = self.instants.get(time)
        if instant is None:
            instant = self.instants[time] = _Instant()
            heapq.heappush(self.times, time)
        return instant

    def _arrive(self, number: int) -> None:
        """Record that a task waits only for its actors and their memory."""
        key, actors = self.keys[number], self.all[number].actors
        for actor in actors:
            insort(self.ready[actor], key)
            self.coming[actor].pop(key, None)
            if len(actors) > 1:
                self.joint[actor].add(number)

    def _finish(self, number: int, touched: set[int]) -> None:
        task = self.all[number]
        self.memory.end(task)
        touched.update(task.actors)
        for actor in task.actors:
            self.busy[actor] = False
            for other in self.joint[actor]:  # an idle actor may wait for this one
                touched.update(self.all[other].actors)

    def _begin(self, actors: Iterable[int], now: float) -> None:
        """Begin what can begin on these actors."""
        for actor in actors:
            if not self.busy[actor] and self.ready[actor]:
                number = self._choose(actor, now)
                if number is not None:
                    self._start(number, now)

    def _choose(self, actor: int, now: float) -> int | None:
        """Return the first task that an idle actor can begin and need not delay."""
        awaited = list(self.coming[actor].items())
        for key in self.ready[actor]:
            number = self.numbers[key]
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
        task, key = self.all[number], self.keys[number]
        finish = now + task.seconds
        self.order.append(number)
        self.memory.begin(task)
        for actor in task.actors:
            ready = self.ready[actor]
            del ready[bisect_left(ready, key)]
            self.joint[actor].discard(number)
            self.busy[actor] = True
            self.until[actor] = finish
        for later, lag in self.after[number]:
            self.arrival[later] = max(self.arrival[later], finish + lag)
            self.waits[later] -= 1
            if not self.waits[later]:
                self._await(later)
        self._at(finish).ends.append(number)

    def _await(self, number: int) -> None:
        """Record when a task arrives; actors with patience take it into account until then."""
        arrival = self.arrival[number]
        self._at(arrival).arrivals.append(number)
        if self.patience:
            for actor in self.all[number].actors:
                self.coming[actor][self.keys[number]] = arrival
