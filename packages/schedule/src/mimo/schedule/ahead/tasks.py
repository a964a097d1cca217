"""The work of a step as a graph of tasks: their costs, memory, dependencies and actors.

Actors with collectives inside a stage's computations (one tensor group over both, say) do a task together; other actors
of the same stage do it at their own times. So an encoder on all ranks of a pipeline can fill each rank's own gaps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import attrs

from mimo.schedule.plan import ActionKind, Costs
from mimo.topology import ModuleGraph, StageId


@attrs.frozen(kw_only=True)
class Task:
    """A computation of a pass of a stage, or its reduction, on the actors that do it together.

    Args:
        kind: backwards with weight gradients are split; others are whole.
        stage: which.
        microbatches: of the pass; empty for ``reduce``.
        actors: by their numbers in ``graph.actors``.
        seconds: how long it keeps them busy.
        takes: bytes that each actor holds more while it runs.
        leaves: bytes that each actor holds more (if negative, less) after it than before it.
    """

    kind: ActionKind
    stage: StageId
    microbatches: tuple[int, ...]
    actors: tuple[int, ...]
    seconds: float
    takes: int = 0
    leaves: int = 0


@attrs.frozen(kw_only=True, eq=False)
class Placed:
    """Tasks placed in time: when each starts, all in the order of their starts, and when the last one ends."""

    starts: Sequence[float]
    order: Sequence[int]
    end: float


@attrs.frozen(kw_only=True, eq=False)
class TaskGraph:
    """All tasks of a step; a task is identified by its index in ``tasks``.

    Args:
        graph: the module graph.
        microbatches: of the step.
        costs: of the step.
        tasks: those of one stage, kind and set of actors in the order of their passes.
        holders: the actors that hold each stage.
        before: for each task those that it waits for, each with the seconds of its message.
        after: for each task those that wait for it, likewise.
    """

    graph: ModuleGraph
    microbatches: int
    costs: Costs
    tasks: Sequence[Task]
    holders: Mapping[StageId, tuple[int, ...]]
    before: Sequence[Sequence[tuple[int, float]]]
    after: Sequence[Sequence[tuple[int, float]]]

    @cached_property
    def made_ahead(self) -> Sequence[int]:
        """Bytes by actor of what is made a step ahead: this step's rows until they are sent, and the next step's.

        Both count as held all the time, so that these tasks need no further bytes.
        """
        sizes = [0] * len(self.graph.actors)
        for stage, numbers in self.holders.items():
            if is_made_ahead(self.graph, stage):
                for number in numbers:
                    sizes[number] += 2 * self.microbatches * self.costs.stages[stage].activations
        return sizes

    @cached_property
    def sources_first(self) -> Sequence[int]:
        """All tasks, each behind those that it waits for."""
        waits = [len(before) for before in self.before]
        free = [number for number, count in enumerate(waits) if not count]
        for number in free:  # grows while it is read
            for later, _ in self.after[number]:
                waits[later] -= 1
                if not waits[later]:
                    free.append(later)
        return free

    @cached_property
    def tails(self) -> Sequence[float]:
        """The seconds from the start of each task to the end of the step, if there were actors for all."""
        tails: list[float] = [0] * len(self.tasks)
        for number in reversed(self.sources_first):
            rest: float = 0
            for later, lag in self.after[number]:
                rest = max(rest, lag + tails[later])
            tails[number] = self.tasks[number].seconds + rest
        return tails

    @cached_property
    def heads(self) -> Sequence[float]:
        """The seconds before each task could start, if there were actors for all."""
        heads: list[float] = [0] * len(self.tasks)
        for number in self.sources_first:
            end = heads[number] + self.tasks[number].seconds
            for later, lag in self.after[number]:
                heads[later] = max(heads[later], end + lag)
        return heads

    @cached_property
    def bound(self) -> float:
        """A lower bound of the step in seconds: the longest path, an actor's work with its shortest head and tail."""
        bound = max((head + tail for head, tail in zip(self.heads, self.tails, strict=True)), default=0)
        owned: list[list[int]] = [[] for _ in self.graph.actors]
        for number, task in enumerate(self.tasks):
            for actor in task.actors:
                owned[actor].append(number)
        for own in owned:
            work = sum(self.tasks[number].seconds for number in own)
            rest = min(self.tails[number] - self.tasks[number].seconds for number in own)
            bound = max(bound, min(self.heads[number] for number in own) + work + rest)
        return bound

    def peak(self, order: Sequence[int]) -> int:
        """Return the most bytes that an actor holds when tasks are done in this order."""
        used = list(self.made_ahead)
        highest = max(used, default=0)
        for number in order:
            task = self.tasks[number]
            for actor in task.actors:
                highest = max(highest, used[actor] + task.takes)
                used[actor] += task.leaves
        return highest

    def placed(self, order: Sequence[int]) -> Placed:
        """Return tasks placed in time: each actor does its tasks in this order, as soon as it can."""
        free: list[float] = [0] * len(self.graph.actors)
        starts: list[float] = [0] * len(self.tasks)
        for number in order:  # what waits for a task stands behind it
            task = self.tasks[number]
            start = starts[number]
            for actor in task.actors:
                start = max(start, free[actor])
            starts[number] = start
            finish = start + task.seconds
            for actor in task.actors:
                free[actor] = finish
            for later, lag in self.after[number]:
                starts[later] = max(starts[later], finish + lag)
        return Placed(starts=starts, order=sorted(order, key=starts.__getitem__), end=max(free, default=0))


def is_made_ahead(graph: ModuleGraph, stage: StageId) -> bool:
    """Return whether the rows of a stage wait for the next step."""
    ends = [graph.by_name[edge.target.module].prefetch for edge in graph.outputs(stage)]
    return graph.by_name[stage.module].prefetch and not all(ends)
