"""Builds the task graph of a step from a module graph and its costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs

from mimo.schedule.ahead.tasks import Task, TaskGraph, is_made_ahead
from mimo.schedule.plan import ActionKind, Costs, Wiring
from mimo.topology import Edge, ModuleGraph, StageId

_Need = tuple[int, float]
"""A task that another waits for, and the seconds of its message."""
_Message = tuple[Sequence[int], int, float]
"""The task that sends each microbatch along an edge, the first microbatch, and the seconds of one."""


def tasks_of(graph: ModuleGraph, microbatches: int, costs: Costs) -> TaskGraph:
    """Return the tasks of a step of ``microbatches`` microbatches."""
    builder = _Builder(graph=graph, microbatches=microbatches, costs=costs, wiring=Wiring(graph=graph))
    builder.build()
    after: list[list[tuple[int, float]]] = [[] for _ in builder.tasks]
    for number, before in enumerate(builder.before):
        for earlier, lag in before:
            after[earlier].append((number, lag))
    return TaskGraph(
        graph=graph,
        microbatches=microbatches,
        costs=costs,
        tasks=builder.tasks,
        holders=builder.wiring.holders,
        before=builder.before,
        after=after,
    )


@attrs.define(kw_only=True, eq=False)
class _Builder:
    """Collects tasks stage by stage: forwards from sources to sinks, then the rest from sinks to sources."""

    graph: ModuleGraph
    microbatches: int
    costs: Costs
    wiring: Wiring
    tasks: list[Task] = attrs.field(factory=list)
    before: list[list[tuple[int, float]]] = attrs.field(factory=list)
    forwards: dict[StageId, dict[tuple[int, ...], list[int]]] = attrs.field(factory=dict)
    """For each stage and set of actors, the task that holds each microbatch."""
    gradients: dict[StageId, dict[tuple[int, ...], list[int]]] = attrs.field(factory=dict)

    def build(self) -> None:
        """Add all tasks."""
        for stage in self.graph.stages:
            self.forwards[stage] = {actors: self._forwards(stage, actors) for actors in self.wiring.meetings[stage]}
        for stage in reversed(self.graph.stages):
            if stage in self.wiring.backward:
                self._backwards(stage)

    def _forwards(self, stage: StageId, actors: tuple[int, ...]) -> list[int]:
        cost, backward = self.costs.stages[stage], stage in self.wiring.backward
        each = 0 if is_made_ahead(self.graph, stage) else cost.activations
        edges = [edge for edge in self.wiring.inputs[stage] if not self.wiring.is_handed_on(edge)]
        messages = [message for edge in edges for message in self._messages(edge, self.forwards[edge.source])]
        places: list[int] = []
        for microbatches in self._passes(stage):
            takes = each * len(microbatches)
            number = self._add(
                Task(
                    kind="forward",
                    stage=stage,
                    microbatches=microbatches,
                    actors=actors,
                    seconds=cost.seconds("forward", len(microbatches)),
                    takes=takes,
                    leaves=takes if backward else 0,
                ),
                [*self._arrivals(messages, microbatches), *((earlier, 0) for earlier in places[-1:])],
            )
            places += [number] * len(microbatches)
        return places

    def _backwards(self, stage: StageId) -> None:
        cost, trains = self.costs.stages[stage], self.wiring.trains(stage)
        last: list[int] = []
        self.gradients[stage] = {}
        edges = [edge for edge in self.wiring.outputs[stage] if edge.gradient]
        messages = [message for edge in edges for message in self._messages(edge, self.gradients[edge.target])]
        for actors in self.wiring.meetings[stage]:
            places: list[int] = []
            # Each actor multiplies what it has, unless the gradients are distributed inside the weight gradient.
            together = self.graph.by_name[stage.module].gathers
            weights: dict[tuple[int, ...], list[int]] = {
                owners: [] for owners in ([actors] if together else [(actor,) for actor in actors])
            }
            for microbatches in self._passes(stage):
                count = len(microbatches)
                split = trains and cost.seconds("weight-gradient", count) > 0
                needs = [
                    *self._arrivals(messages, microbatches),
                    (self.forwards[stage][actors][microbatches[0]], 0),
                    *((earlier, 0) for earlier in places[-1:]),
                ]
                number = self._gradient(stage, microbatches, actors, needs, split=split)
                places += [number] * count
                if split:
                    for owners, earlier in weights.items():
                        earlier.append(self._weights(number, owners, earlier[-1:]))
            self.gradients[stage][actors] = places
            last += [own[-1] for own in weights.values() if own] or places[-1:]
        if trains:  # even if it takes no time, all actors have to take part
            task = Task(
                kind="reduce", stage=stage, microbatches=(), actors=self.wiring.holders[stage], seconds=cost.reduce
            )
            self._add(task, [(number, 0) for number in last])

    def _gradient(
        self,
        stage: StageId,
        microbatches: tuple[int, ...],
        actors: tuple[int, ...],
        before: list[_Need],
        *,
        split: bool,
    ) -> int:
        """Add the backward of a pass, or if it is split its first part."""
        cost, count = self.costs.stages[stage], len(microbatches)
        kind: ActionKind = "input-gradient" if split else "backward"
        task = Task(
            kind=kind,
            stage=stage,
            microbatches=microbatches,
            actors=actors,
            seconds=cost.seconds(kind, count),
            takes=cost.recomputed * count,
            leaves=(cost.weight_inputs * split - cost.activations) * count,
        )
        return self._add(task, before)

    def _weights(self, gradient: int, actors: tuple[int, ...], before: Sequence[int]) -> int:
        first = self.tasks[gradient]
        cost, count = self.costs.stages[first.stage], len(first.microbatches)
        task = Task(
            kind="weight-gradient",
            stage=first.stage,
            microbatches=first.microbatches,
            actors=actors,
            seconds=cost.seconds("weight-gradient", count),
            leaves=-cost.weight_inputs * count,
        )
        return self._add(task, [(gradient, 0), *((earlier, 0) for earlier in before)])

    def _passes(self, stage: StageId) -> tuple[tuple[int, ...], ...]:
        return self.wiring.passes(stage.module, self.microbatches)

    def _messages(self, edge: Edge, senders: Mapping[tuple[int, ...], Sequence[int]]) -> Iterator[_Message]:
        """Yield how each set of actors sends along an edge, given the task that holds each microbatch."""
        seconds, first = self.costs.message(self.graph, edge), self.wiring.first(edge.source, self.microbatches)
        for places in senders.values():
            yield places, first, seconds

    def _arrivals(self, messages: Sequence[_Message], microbatches: Sequence[int]) -> Iterator[_Need]:
        """Yield the tasks that send these microbatches, each with the time until what the pass needs has arrived."""
        begin, last = microbatches[0], microbatches[-1]
        for places, first, seconds in messages:
            for number in dict.fromkeys(places[begin - first : last - first + 1]):
                sent = self.tasks[number].microbatches
                yield number, seconds * min(len(sent), last - sent[0] + 1)

    def _add(self, task: Task, before: list[_Need]) -> int:
        self.tasks.append(task)
        self.before.append(before)
        return len(self.tasks) - 1
