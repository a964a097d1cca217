"""The ``1f1b`` schedule over any module graph: an event-driven list schedule with bounded microbatches in flight.

For a plain pipeline this is the textbook one-forward-one-backward order (PipeDream-Flush: Narayanan et al., "Memory-
Efficient Pipeline-Parallel DNN Training", 2021, section 3). For a graph, a computation of a stage occupies all actors
that hold the stage at once, and of those that could start now, the one goes first that frees memory soonest.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

import attrs

from mimo.hooks import ConfigError, hookimpl
from mimo.schedule._assemble import Timed, assemble, stages_to_sink
from mimo.schedule._costs import Costs
from mimo.schedule._plan import Plan, ScheduleSpec
from mimo.topology import ModuleGraph, StageId

_FORWARD_UNITS = 1
_BACKWARD_UNITS = 2


@attrs.frozen(kw_only=True)
class OneForwardOneBackward:
    """Configuration of the ``1f1b`` schedule; it has no keys."""


@attrs.define(kw_only=True, eq=False)
class _Stage:
    """A stage while the schedule is made. Its microbatches go in order, so counts say which ones are done."""

    id: StageId
    number: int
    actors: tuple[int, ...]
    backward: bool
    bound: int
    sources: list[_Stage] = attrs.field(factory=list)
    targets: list[_Stage] = attrs.field(factory=list)
    gradient_targets: list[_Stage] = attrs.field(factory=list)
    forwards_begun: int = 0
    forwards: int = 0
    backwards: int = 0

    @property
    def in_flight(self) -> int:
        """Microbatches begun whose rows somebody still needs: for backward, or for a consumer's forward."""
        if self.backward:
            return self.forwards_begun - self.backwards
        return self.forwards_begun - min((target.forwards for target in self.targets), default=self.forwards)

    def next(self, microbatches: int) -> Timed | None:
        """Return what this stage could do now if its actors were free, backward before forward, at time 0."""
        ready = self.backwards
        if self.backward and ready < self.forwards and all(it.backwards > ready for it in self.gradient_targets):
            return Timed(kind="backward", stage=self.id, microbatches=(ready,), start=0, finish=_BACKWARD_UNITS)
        ready = self.forwards
        may_begin = ready < microbatches and self.in_flight < self.bound
        if may_begin and all(source.forwards > ready for source in self.sources):
            return Timed(kind="forward", stage=self.id, microbatches=(ready,), start=0, finish=_FORWARD_UNITS)
        return None

    def priority(self, computation: Timed) -> tuple[bool, int, int, int]:
        """Return the key by which the list schedule takes ``computation``, lowest first."""
        return (computation.kind == "forward", computation.microbatches[0], self.bound, self.number)


def generate(graph: ModuleGraph, microbatches: int, config: OneForwardOneBackward, _costs: Costs) -> Plan:
    """Return the 1F1B plan of ``microbatches`` microbatches over ``graph``; without training, of forwards alone.

    Raises:
        ConfigError: there is no microbatch.
    """
    assert isinstance(config, OneForwardOneBackward), config
    if microbatches < 1:
        raise ConfigError("microbatches", expected="1 or more in a step", got=repr(microbatches))
    return assemble("1f1b", graph, microbatches, _place(_stages(graph), microbatches, actors=len(graph.actors)))


def _stages(graph: ModuleGraph) -> list[_Stage]:
    actors: dict[StageId, list[int]] = {}
    for index, actor in enumerate(graph.actors):
        for stage in actor.stages:
            actors.setdefault(stage, []).append(index)
    bounds = stages_to_sink(graph)
    stages = {
        stage: _Stage(
            id=stage,
            number=number,
            actors=tuple(actors[stage]),
            backward=graph.runs_backward(stage),
            bound=bounds[stage],
        )
        for number, stage in enumerate(graph.stages)
    }
    for edge in graph.edges:
        source, target = stages[edge.source], stages[edge.target]
        target.sources.append(source)
        source.targets.append(target)
        if edge.gradient:
            source.gradient_targets.append(target)
    return list(stages.values())


def _place(stages: list[_Stage], microbatches: int, *, actors: int) -> Iterator[Timed]:
    """Yield every computation with its times.

    It ends with all of them done: the lowest unfinished microbatch is never held back by a bound, since nothing before
    it is in flight any more. Only stages that an ending may have freed are looked at again, so the work is linear in
    the number of computations.
    """
    held: list[list[_Stage]] = [[] for _ in range(actors)]
    for stage in stages:
        for actor in stage.actors:
            held[actor].append(stage)
    busy = [False] * actors
    running: list[tuple[float, int, Timed]] = []
    by_number = {stage.number: stage for stage in stages}
    now: float = 0
    touched = set(by_number)
    while True:
        for stage, computation in _by_priority((by_number[number] for number in touched), microbatches):
            if any(busy[actor] for actor in stage.actors):
                continue
            begun = attrs.evolve(computation, start=now, finish=now + computation.finish)
            stage.forwards_begun += begun.kind == "forward"
            for actor in stage.actors:
                busy[actor] = True
            heapq.heappush(running, (begun.finish, stage.number, begun))
            yield begun
        if not running:
            break
        now, touched = running[0][0], set()
        while running and running[0][0] == now:
            _, number, ended = heapq.heappop(running)
            stage = by_number[number]
            stage.forwards += ended.kind == "forward"
            stage.backwards += ended.kind == "backward"
            touched |= {other.number for other in (*stage.sources, *stage.targets)}
            for actor in stage.actors:
                busy[actor] = False
                touched |= {other.number for other in held[actor]}


def _by_priority(stages: Iterable[_Stage], microbatches: int) -> list[tuple[_Stage, Timed]]:
    ready = [(stage, computation) for stage in stages if (computation := stage.next(microbatches))]
    return sorted(ready, key=lambda pair: pair[0].priority(pair[1]))


@hookimpl
def mimo_register_schedules() -> list[ScheduleSpec]:
    """Register ``1f1b``."""
    return [ScheduleSpec(name="1f1b", config=OneForwardOneBackward, generate=generate)]
