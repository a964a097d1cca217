"""What makes the schedules with fixed orders: an event-driven list schedule places a step in time over the graph.

The one idea: dependencies, fixed orders and bounds all say "this after that", so they alone decide whether a step ends;
priorities and times only choose among what may begin. Whenever an actor becomes free, the pass with the lowest key that
can begin on it goes first; a computation of several actors claims those that are already free.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import attrs

from mimo.schedule.plan import ActionKind, Timed
from mimo.schedule.schedules.list_state import EdgeState, Pass, StagePart, StageState, begin_stages
from mimo.topology import ModuleGraph, StageId

Key = tuple[int, ...]
_UNITS: Mapping[ActionKind, int] = {"forward": 1, "backward": 2, "input-gradient": 1, "weight-gradient": 1}


@attrs.frozen
class PipelineRank:
    """The ranks at one place along a module's pipeline; they hold a stage of each of its chunks."""

    module: str
    place: int


def units(wanted: Pass) -> float:
    """Return the time of a pass if forward, input gradient and weight gradient each take one unit a microbatch."""
    return _UNITS[wanted.kind] * len(wanted.microbatches)


@attrs.frozen(kw_only=True)
class ListRules:
    """The choices that define a list schedule.

    Args:
        priority: key of a pass; of the passes that could begin on an actor, the lowest goes first.
        orders: for pipeline ranks with a fixed order, all their passes in that order; the next one is the only
            candidate. It has a stage's passes of one kind in the order of their microbatches, each backward behind its
            forward; with weight gradients, all backwards of the stage are split.
        bounds: for stages without a fixed order, how many microbatches may be in flight; others have no bound.
        seconds: time of a pass, in any unit.
        latency: time of a message on an edge, by its name, in the same unit.
    """

    priority: Callable[[Pass], Key]
    orders: Mapping[PipelineRank, Sequence[Pass]] = attrs.field(factory=dict)
    bounds: Mapping[StageId, int] = attrs.field(factory=dict)
    seconds: Callable[[Pass], float] = units
    latency: Callable[[str], float] = lambda _edge: 0


def list_schedule(graph: ModuleGraph, microbatches: int, rules: ListRules) -> list[Timed]:
    """Return every computation of a step with its times, in the order of their starts.

    Actors with collectives inside a computation (tensor ranks, say) do it together; other actors of the same stage do
    it at their own times. When a pass ends, only candidates that it may have freed are examined, so that the work is
    linear in the actors' computations.

    Args:
        graph: the module graph.
        microbatches: of the step.
        rules: what goes first and how far ahead. It asserts that the step can end under its orders and bounds.
    """
    run = _ListScheduler(graph, microbatches, rules)
    placed = run.run()
    for stage in run.stages.values():
        for part in stage.parts:
            assert part.is_done, (stage.id, part.actors, part.forwards, part.backwards, part.weights)
    return placed


@attrs.define(kw_only=True, eq=False)
class _PipelineActors:
    """Pipeline ranks on actors that compute together: their stages, and their order if it is fixed."""

    number: int
    actors: tuple[int, ...]
    order: Sequence[Pass] | None
    parts: dict[StageId, StagePart] = attrs.field(factory=dict)
    begun: int = 0

    def candidates(self) -> Iterator[Pass]:
        """Yield the passes that could begin here if all actors were free."""
        if self.order is None:
            for part in self.parts.values():
                yield from part.candidates()
        elif self.begun < len(self.order):
            wanted = self.order[self.begun]
            if self.parts[wanted.stage].stage.is_ready(wanted):
                yield wanted


@attrs.frozen
class _Arrival:
    """A message that has not arrived yet."""

    edge: EdgeState
    is_gradient: bool
    count: int


class _ListScheduler:
    """A step while it is placed."""

    def __init__(self, graph: ModuleGraph, microbatches: int, rules: ListRules) -> None:
        self._rules = rules
        split_stages = {
            item.stage for order in rules.orders.values() for item in order if item.kind == "weight-gradient"
        }
        self.stages = begin_stages(graph, microbatches, split=split_stages, bounds=rules.bounds)
        self._rows: list[_PipelineActors] = []
        self._rows_of: dict[StageId, list[_PipelineActors]] = {}
        self._rows_on: list[list[_PipelineActors]] = [[] for _ in graph.actors]
        self._gather_rows(graph)
        self._busy = [False] * len(graph.actors)
        self._claims: list[tuple[Key, _PipelineActors] | None] = [None] * len(graph.actors)
        self._events: list[tuple[float, int, tuple[_PipelineActors, Pass] | _Arrival]] = []
        self._now: float = 0
        self._event_count = 0

    def _gather_rows(self, graph: ModuleGraph) -> None:
        groups: dict[tuple[PipelineRank, tuple[int, ...]], _PipelineActors] = {}
        for stage in self.stages.values():
            place = PipelineRank(stage.id.module, graph.by_name[stage.id.module].pipeline_rank(stage.id.stage))
            for part in stage.parts:
                row = groups.get((place, part.actors))
                if row is None:
                    row = _PipelineActors(number=len(groups), actors=part.actors, order=self._rules.orders.get(place))
                    groups[place, part.actors] = row
                row.parts[stage.id] = part
                self._rows_of.setdefault(stage.id, []).append(row)
        self._rows += groups.values()
        for row in self._rows:
            for actor in row.actors:
                self._rows_on[actor].append(row)

    def run(self) -> list[Timed]:
        """Return all computations, placed."""
        placed = list(self._begin(range(len(self._rows))))
        while self._events:
            self._now = self._events[0][0]
            touched: set[int] = set()
            while self._events and self._events[0][0] == self._now:
                _, _, event = heapq.heappop(self._events)
                if isinstance(event, _Arrival):
                    self._arrive(event, touched)
                else:
                    self._end(*event, touched)
            placed += self._begin(touched)
        return placed

    def _begin(self, touched: Iterable[int]) -> Iterator[Timed]:
        """Begin passes on these actors, by priority."""
        rows = [row for row in map(self._rows.__getitem__, sorted(touched)) if self._has_free(row)]
        ready = [(self._rules.priority(wanted), row, wanted) for row in rows for wanted in row.candidates()]
        for key, row, wanted in sorted(ready, key=lambda candidate: candidate[0]):
            if self._take(key, row):
                row.begun += 1
                row.parts[wanted.stage].begin(wanted.kind)
                finish = self._now + self._rules.seconds(wanted)
                self._push(finish, (row, wanted))
                yield Timed(
                    kind=wanted.kind,
                    stage=wanted.stage,
                    microbatches=wanted.microbatches,
                    start=self._now,
                    finish=finish,
                    actors=row.actors,
                )

    def _has_free(self, row: _PipelineActors) -> bool:
        return not all(self._busy[actor] for actor in row.actors)

    def _take(self, key: Key, row: _PipelineActors) -> bool:
        """Occupy a row's actors if all are free and none is claimed by a lower key; otherwise claim the free ones."""
        if len(row.actors) == 1:
            actor = row.actors[0]
            if self._is_open(actor, key, row):
                self._busy[actor] = True
                return True
            return False
        free = [actor for actor in row.actors if self._is_open(actor, key, row)]
        takes = len(free) == len(row.actors)
        for actor in free:
            self._busy[actor] = takes
            self._claims[actor] = None if takes else (key, row)
        return takes

    def _is_open(self, actor: int, key: Key, row: _PipelineActors) -> bool:
        if self._busy[actor]:
            return False
        claim = self._claims[actor]
        return claim is None or claim[1] is row or key < claim[0]

    def _end(self, row: _PipelineActors, ended: Pass, touched: set[int]) -> None:
        for actor in row.actors:
            self._busy[actor] = False
            touched.update(other.number for other in self._rows_on[actor])
        stage, last = self.stages[ended.stage], ended.microbatches[-1]
        if ended.kind == "forward":
            if stage.forward.end(last):
                for edge in stage.inputs:
                    self._touch(edge.source, touched)
                for edge in stage.outputs:
                    if edge.target.prefetch == stage.prefetch:
                        self._send(_Arrival(edge, is_gradient=False, count=last + 1), touched)
        elif ended.kind != "weight-gradient" and stage.gradient.end(last):
            for edge in stage.inputs:
                if edge.gradient:
                    self._send(_Arrival(edge, is_gradient=True, count=last + 1), touched)

    def _send(self, message: _Arrival, touched: set[int]) -> None:
        latency = self._rules.latency(message.edge.name)
        if latency:
            self._push(self._now + latency, message)
        else:
            self._arrive(message, touched)

    def _arrive(self, message: _Arrival, touched: set[int]) -> None:
        edge = message.edge
        if message.is_gradient:
            edge.gradients = message.count
            self._touch(edge.source, touched)
        else:
            edge.rows = message.count
            self._touch(edge.target, touched)

    def _touch(self, stage: StageState, touched: set[int]) -> None:
        touched.update(row.number for row in self._rows_of[stage.id])

    def _push(self, time: float, event: tuple[_PipelineActors, Pass] | _Arrival) -> None:
        self._event_count += 1
        heapq.heappush(self._events, (time, self._event_count, event))
