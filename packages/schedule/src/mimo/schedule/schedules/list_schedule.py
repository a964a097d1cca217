"""The engine of the schedules with a name: a step placed in time by an event-driven list schedule over the graph.

The one idea: dependencies, fixed orders and bounds all say "this after that", so whether a step ends is decided by
them alone; priorities and times only choose among what may begin. Whenever an actor comes free, of what could begin on
it the lowest key goes first, and a computation that several actors do together claims those that are free already.
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
    """The ranks at one place along a module's pipeline, which hold a stage of each of its chunks."""

    module: str
    place: int


def units(wanted: Pass) -> float:
    """Return the time of a pass where forward, input gradient and weight gradient take a unit each a microbatch."""
    return _UNITS[wanted.kind] * len(wanted.microbatches)


@attrs.frozen(kw_only=True)
class ListRules:
    """What makes one list schedule another.

    Args:
        priority: key of a pass; of those that could begin on an actor, the lowest goes first.
        orders: for lines whose order is fixed, all their passes in that order. The next one is the line's only
            candidate. A stage's passes of a kind are in the order of their microbatches there, each backward behind
            its forward; with weight gradients, all its backwards are in two parts.
        bounds: for stages of other lines, how many microbatches may be in flight; a stage left out has no bound.
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

    Actors that meet inside a computation (tensor ranks, say) do it together, others that hold the same stage each at
    times of their own. Only lines that an ending may have freed are looked at again, so that the work is linear in the
    actors' computations.

    Args:
        graph: the module graph.
        microbatches: of the step.
        rules: what goes first and how far ahead. That orders and bounds leave a way through the step is an assertion.
    """
    run = _ListScheduler(graph, microbatches, rules)
    placed = run.run()
    for stage in run.stages.values():
        for part in stage.parts:
            assert part.is_done, (stage.id, part.actors, part.forwards, part.backwards, part.weights)
    return placed


@attrs.define(kw_only=True, eq=False)
class _PipelineActors:
    """A line on actors that compute together: its stages there, and the rest of its order if that is fixed."""

    number: int
    actors: tuple[int, ...]
    order: Sequence[Pass] | None
    parts: dict[StageId, StagePart] = attrs.field(factory=dict)
    begun: int = 0

    def candidates(self) -> Iterator[Pass]:
        """Yield what could begin here if all actors were free."""
        if self.order is None:
            for part in self.parts.values():
                yield from part.candidates()
        elif self.begun < len(self.order):
            wanted = self.order[self.begun]
            if self.parts[wanted.stage].stage.is_ready(wanted):
                yield wanted


@attrs.frozen
class _Arrival:
    """A message on its way."""

    edge: EdgeState
    is_gradient: bool
    count: int


class _ListScheduler:
    """The step while it is placed."""

    def __init__(self, graph: ModuleGraph, microbatches: int, rules: ListRules) -> None:
        self._rules = rules
        in_two = {one.stage for order in rules.orders.values() for one in order if one.kind == "weight-gradient"}
        self.stages = begin_stages(graph, microbatches, split=in_two, bounds=rules.bounds)
        self._rows: list[_PipelineActors] = []
        self._rows_of: dict[StageId, list[_PipelineActors]] = {}
        self._held: list[list[_PipelineActors]] = [[] for _ in graph.actors]
        self._gather_rows(graph)
        self._busy = [False] * len(graph.actors)
        self._claims: list[tuple[Key, _PipelineActors] | None] = [None] * len(graph.actors)
        self._events: list[tuple[float, int, tuple[_PipelineActors, Pass] | _Arrival]] = []
        self._now: float = 0
        self._counted = 0

    def _gather_rows(self, graph: ModuleGraph) -> None:
        found: dict[tuple[PipelineRank, tuple[int, ...]], _PipelineActors] = {}
        for stage in self.stages.values():
            line = PipelineRank(stage.id.module, graph.by_name[stage.id.module].pipeline_rank(stage.id.stage))
            for part in stage.parts:
                row = found.get((line, part.actors))
                if row is None:
                    row = _PipelineActors(number=len(found), actors=part.actors, order=self._rules.orders.get(line))
                    found[line, part.actors] = row
                row.parts[stage.id] = part
                self._rows_of.setdefault(stage.id, []).append(row)
        self._rows += found.values()
        for row in self._rows:
            for actor in row.actors:
                self._held[actor].append(row)

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
        """Begin what may on these rows, by priority."""
        rows = [self._rows[number] for number in sorted(touched)]
        ready = [(self._rules.priority(wanted), row, wanted) for row in rows for wanted in row.candidates()]
        for key, row, wanted in sorted(ready, key=lambda found: found[0]):
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

    def _take(self, key: Key, row: _PipelineActors) -> bool:
        """Make a row's actors busy if all are free and nobody before it claims one; else claim those that are free."""
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
            touched.update(other.number for other in self._held[actor])
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
        self._counted += 1
        heapq.heappush(self._events, (time, self._counted, event))
