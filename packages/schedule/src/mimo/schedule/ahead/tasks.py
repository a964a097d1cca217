"""The work of a step as a graph of tasks: what each costs, keeps, waits for, and on which actors it runs.

Actors whose ranks meet inside a stage's computations (one tensor group over both, say) do such a task together; others
that hold the same stage do it each at a time of its own. So an encoder that is spread over all ranks of a pipeline can
work in each rank's own gaps.
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
        kind: a backward without weight work is whole, all others are in two parts.
        stage: which.
        microbatches: of the pass; empty for ``reduce``.
        actors: by their numbers in ``graph.actors``.
        seconds: how long it keeps them busy.
        takes: bytes by which each of them keeps more while it runs.
        leaves: bytes by which each of them keeps more (less, where negative) after it than before it.
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
    """All tasks of a step; whatever names a task does so by its place in ``tasks``.

    Args:
        graph: the module graph.
        microbatches: of the step.
        costs: what the tasks cost.
        tasks: those of one stage, kind and set of actors in the order of their passes.
        holders: the actors that hold each stage.
        before: for each task those that it waits for, each with the seconds that their message takes.
        after: the same arrows from their other end.
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
        """Bytes by actor of what is made a step ahead: this step's until it is sent, and by and by the next one's.

        Both are taken to be there all the time, so that these tasks need no bytes beside.
        """
        found = [0] * len(self.graph.actors)
        for stage, numbers in self.holders.items():
            if is_made_ahead(self.graph, stage):
                for number in numbers:
                    found[number] += 2 * self.microbatches * self.costs.stages[stage].activations
        return found

    @cached_property
    def sources_first(self) -> Sequence[int]:
        """All tasks, each behind those that it waits for."""
        waits = [len(before) for before in self.before]
        free = [number for number, count in enumerate(waits) if not count]
        for number in free:  # grows as it goes
            for later, _ in self.after[number]:
                waits[later] -= 1
                if not waits[later]:
                    free.append(later)
        return free

    @cached_property
    def tails(self) -> Sequence[float]:
        """The seconds from the start of each task to the end of the step, were there actors for all."""
        tails: list[float] = [0] * len(self.tasks)
        for number in reversed(self.sources_first):
            rest = max((lag + tails[later] for later, lag in self.after[number]), default=0)
            tails[number] = self.tasks[number].seconds + rest
        return tails

    @cached_property
    def heads(self) -> Sequence[float]:
        """The seconds before each task could start, were there actors for all."""
        heads: list[float] = [0] * len(self.tasks)
        for number in self.sources_first:
            ends = (heads[earlier] + self.tasks[earlier].seconds + lag for earlier, lag in self.before[number])
            heads[number] = max(ends, default=0)
        return heads

    @cached_property
    def bound(self) -> float:
        """Seconds that the step takes at least: the longest path, or an actor's work between its nearest ends."""
        found = max((head + tail for head, tail in zip(self.heads, self.tails, strict=True)), default=0)
        for actor in range(len(self.graph.actors)):
            own = [number for number, task in enumerate(self.tasks) if actor in task.actors]
            work = sum(self.tasks[number].seconds for number in own)
            rest = min(self.tails[number] - self.tasks[number].seconds for number in own)
            found = max(found, min(self.heads[number] for number in own) + work + rest)
        return found

    def peak(self, order: Sequence[int]) -> int:
        """Return the most bytes that an actor keeps when tasks are done in this order."""
        kept = list(self.made_ahead)
        highest = max(kept, default=0)
        for number in order:
            task = self.tasks[number]
            for actor in task.actors:
                highest = max(highest, kept[actor] + task.takes)
                kept[actor] += task.leaves
        return highest

    def placed(self, order: Sequence[int]) -> Placed:
        """Return tasks as placed in time when each actor does its own in this order, as soon as it can."""
        free: list[float] = [0] * len(self.graph.actors)
        starts: list[float] = [0] * len(self.tasks)
        end: float = 0
        for number in order:
            task = self.tasks[number]
            start = max(free[actor] for actor in task.actors)
            for earlier, lag in self.before[number]:
                start = max(start, starts[earlier] + self.tasks[earlier].seconds + lag)
            starts[number] = start
            finish = start + task.seconds
            for actor in task.actors:
                free[actor] = finish
            end = max(end, finish)
        return Placed(starts=starts, order=sorted(order, key=starts.__getitem__), end=end)


def is_made_ahead(graph: ModuleGraph, stage: StageId) -> bool:
    """Tell whether the rows of a stage wait for the next step."""
    ends = [graph.by_name[edge.target.module].prefetch for edge in graph.outputs(stage)]
    return graph.by_name[stage.module].prefetch and not all(ends)
