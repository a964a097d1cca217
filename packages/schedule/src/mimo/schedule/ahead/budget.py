"""The memory budget of actors: which tasks may begin so that the step can always end within it.

The one idea, from the banker's algorithm (Dijkstra, EWD 123): whatever has begun, the step must be able to end
microbatch by microbatch (`turns`) within the budget. A forward begins early only if that remains true. So a budget
works if that order, from the start, fits into it. Other budgets are refused although they may work: where frozen stages
share actors with others, or run a step ahead, some other order may need less.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence

import attrs

from mimo.schedule.ahead.tasks import Task, TaskGraph, is_made_ahead
from mimo.schedule.ahead.turns import Turns, turns_of
from mimo.topology import StageId


@attrs.define(kw_only=True, eq=False)
class _StageMemory:
    """A stage on an actor: bytes of a microbatch, and how many microbatches have begun each computation.

    ``freed`` counts microbatches with nothing left to do; ``backwards`` also those that still need a weight gradient.
    """

    activations: int
    recomputed: int
    factor: int
    turns: Turns
    backward: bool
    limit: int
    forwards: int = 0
    backwards: int = 0
    freed: int = 0

    @property
    def done(self) -> int:
        """How many microbatches hold nothing, or only what a weight gradient needs."""
        return self.backwards if self.backward else self.forwards

    @property
    def turn(self) -> int:
        """The first turn that is not finished."""
        turns = bisect_right(self.turns.begun, self.forwards)
        return min(turns, bisect_right(self.turns.ended, self.done)) - 1


@attrs.define(kw_only=True, eq=False)
class _ActorMemory:
    """Bytes that one actor holds: ``used`` in total, ``held`` without what only a weight gradient still needs.

    ``always`` is held from the beginning of the step to its end, and is part of both.
    """

    always: int = 0
    slots: list[_StageMemory] = attrs.field(factory=list)  # sources before targets
    period: int = 1
    turn_peak: int = 0
    used: int = 0
    held: int = 0

    def peak(self, turn: int) -> int:
        """Return the peak of a turn, if all turns before it are done and nothing else begins."""
        now = highest = self.always
        for slot in self.slots:
            if slot.backward:
                ended = max(slot.backwards, slot.turns.ended[turn])
                now += slot.activations * (max(slot.forwards, slot.turns.begun[turn]) - ended)
        for slot in self.slots:  # without backward: these free at once, before their consumers begin
            if not slot.backward:
                count = slot.turns.begun[turn + 1] - max(slot.forwards, slot.turns.begun[turn])
                highest = max(highest, now + slot.activations * min(count, slot.factor))
        for slot in self.slots:
            if slot.backward:
                count = slot.turns.begun[turn + 1] - max(slot.forwards, slot.turns.begun[turn])
                now += slot.activations * max(0, count)
        highest = max(highest, now)
        for slot in reversed(self.slots):
            if slot.backward:
                last = slot.turns.ended[turn + 1]
                for first in range(max(slot.backwards, slot.turns.ended[turn]), last, slot.factor):
                    count = min(slot.factor, last - first)
                    highest = max(highest, now + slot.recomputed * count)
                    now -= slot.activations * count
        return highest

    def fits(self, budget: int) -> bool:
        """Return whether the step can end from here, one turn after the other."""
        first = min(slot.turn for slot in self.slots)
        last = max(bisect_left(slot.turns.ended, slot.done) for slot in self.slots) + self.period
        last = min(last, len(self.slots[0].turns.ended) - 1)  # later turns hold no more
        return all(self.peak(turn) <= budget for turn in range(first, last))


class MemoryBudget:
    """The bytes that all actors hold while a schedule is made.

    Args:
        tasks: of the step.
        budget: bytes that each actor may hold at most; 0 for no limit.
        limits: for some stages, how many microbatches may be in flight; turns may need and get more.
    """

    def __init__(self, tasks: TaskGraph, budget: int, limits: Mapping[StageId, int] | None = None) -> None:
        self._budget = budget
        graph = tasks.graph
        self._limited = limits is not None
        self._actors = [_ActorMemory(always=always, used=always, held=always) for always in tasks.made_ahead]
        self._slots: dict[tuple[StageId, int], _StageMemory] = {}
        turns = turns_of(graph, tasks.microbatches)
        period = min(math.lcm(*(module.batch_factor for module in graph.modules)), tasks.microbatches)
        for stage in graph.stages:
            cost = tasks.costs.stages[stage]
            limit = (limits or {}).get(stage, tasks.microbatches)
            for number in tasks.holders[stage]:
                slot = _StageMemory(
                    activations=0 if is_made_ahead(graph, stage) else cost.activations,
                    recomputed=cost.recomputed,
                    factor=graph.by_name[stage.module].batch_factor,
                    turns=turns[stage],
                    backward=graph.runs_backward(stage),
                    limit=max(limit, turns[stage].max_in_flight),
                )
                self._actors[number].slots.append(slot)
                self._slots[stage, number] = slot
        for actor in self._actors:
            actor.period = period
            actor.turn_peak = max(map(actor.peak, range(period)))

    @property
    def smallest(self) -> int:
        """The smallest budget with which a step that has not begun can end in turns."""
        return max(actor.turn_peak for actor in self._actors)

    def allows(self, task: Task) -> bool:
        """Return whether a task may begin now."""
        if task.kind == "forward" and self._limited:
            for number in task.actors:
                slot = self._slots[task.stage, number]
                if slot.backward and slot.forwards - slot.freed + len(task.microbatches) > slot.limit:
                    return False
        if not self._budget or not task.takes:
            return True
        actors = [self._actors[number] for number in task.actors]
        if any(actor.used + task.takes > self._budget for actor in actors):
            return False
        if task.kind != "forward" or not task.leaves:
            return True
        return all(self._stays_safe(actor, task, number) for actor, number in zip(actors, task.actors, strict=True))

    def _stays_safe(self, actor: _ActorMemory, task: Task, number: int) -> bool:
        if actor.held + task.leaves + actor.turn_peak <= self._budget:
            return True
        slot = self._slots[task.stage, number]
        slot.forwards += len(task.microbatches)
        safe = actor.fits(self._budget)
        slot.forwards -= len(task.microbatches)
        return safe

    def begin(self, task: Task) -> None:
        """Record that a task has begun."""
        if task.kind == "reduce" or not (self._budget or self._limited):
            return
        count, cost = len(task.microbatches), task.takes
        for number in task.actors:
            actor, slot = self._actors[number], self._slots[task.stage, number]
            actor.used += cost
            if task.kind == "forward":
                slot.forwards += count
                actor.held += task.leaves
            elif task.kind != "weight-gradient":
                slot.backwards += count
                actor.held -= slot.activations * count
            if task.kind in ("backward", "weight-gradient"):
                slot.freed += count

    def end(self, task: Task) -> None:
        """Record that a task has ended."""
        if not self._budget:
            return
        change = task.leaves - task.takes
        for number in task.actors:
            self._actors[number].used += change


def smallest_budget(tasks: TaskGraph) -> int:
    """Return the smallest budget within which every actor can do its part of the step in turns."""
    return MemoryBudget(tasks, 0).smallest


def within(tasks: TaskGraph, actor: int, order: Sequence[int], budget: int) -> bool:
    """Return whether an actor that does these tasks in this order stays within the budget."""
    used = tasks.made_ahead[actor]
    for number in order:
        task = tasks.tasks[number]
        if used + task.takes > budget:
            return False
        used += task.leaves
    return True
