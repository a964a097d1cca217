"""From computations placed in time to a plan: adds messages and reductions in one total order, then splits it by actor.

The one idea: every computation, message and reduction is an event with one place in a global
order for all its actors. An actor's list is that order filtered by the actor, so no circle of waiting can arise, even
if every message is a rendezvous of all its senders and receivers, and every rank does one thing at a time.
Events are ordered by when they end. So a message comes before whatever its actors compute when it leaves: where
messages travel beside computations, receives are posted a computation early.
Actors that hold a stage without collectives between them may compute a pass at different times: the message leaves when
the last of them is done. An actor that is both ends lists its receive and right behind it its send: they are one batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter

import attrs

from mimo.hooks import PlanError
from mimo.schedule.plan.plan import Action, ActionKind, ActorPlan, Plan, tied_edge
from mimo.schedule.plan.texts import action_text
from mimo.schedule.plan.wiring import Wiring
from mimo.topology import Edge, ModuleGraph, StageId

COMPUTATIONS = frozenset({"forward", "backward", "input-gradient", "weight-gradient"})
_FORWARD, _BACKWARD, _EARLIER_ROWS, _REDUCE = range(4)
"""The order of events that end at one time. Forwards go from sources to sinks, backwards the other way, each with what
it sends behind it: so a receiver that computes until then lists the message before that."""


@attrs.frozen(kw_only=True)
class Timed:
    """A computation of one stage, from ``start`` to ``finish`` in any unit of time.

    It runs on ``actors``, numbered as in ``graph.actors``; where that is None on every actor that holds the stage. A
    ``reduce`` of a stage may be placed too.
    """

    kind: ActionKind
    stage: StageId
    microbatches: tuple[int, ...]
    start: float
    finish: float
    actors: tuple[int, ...] | None = None

    @property
    def action(self) -> Action:
        """The action that the plan lists for it."""
        return Action(kind=self.kind, module=self.stage.module, stage=self.stage.stage, microbatches=self.microbatches)


_Holders = Mapping[StageId, Sequence[int]]
_EventKey = tuple[float, ...]
_Part = tuple[Action, Sequence[int]]
"""An action, and the actors that do it."""
_Event = tuple[_EventKey, tuple[_Part, ...]]
"""Its key in the total order, and its parts: of a message the receive and the send."""


def assemble(schedule: str, graph: ModuleGraph, microbatches: int, computations: Iterable[Timed]) -> Plan:
    """Return the plan that runs ``computations``, with all messages and reductions that they need.

    Args:
        schedule: name of the schedule that placed them.
        graph: the module graph.
        microbatches: number of microbatches in the step.
        computations: every computation of the step. Two on one actor do not overlap in time, each starts no earlier
            than what it needs has finished, and those of one stage and kind are, on each actor, in the order of their
            microbatches. Each takes some time, however little: it comes behind what it needs by when it ends.

    Raises:
        PlanError: a computation does not finish after its start.
    """
    placed = list(computations)
    for timed in placed:
        if timed.kind in COMPUTATIONS and not timed.finish > timed.start:
            raise PlanError(
                f"computations, {action_text(timed.action)}",
                expected="a finish after its start",
                got=f"start {timed.start}, finish {timed.finish}",
            )
    holders: dict[StageId, list[int]] = {}
    for index, actor in enumerate(graph.actors):
        for stage in actor.stages:
            holders.setdefault(stage, []).append(index)
    wiring = Wiring(graph=graph)
    events = [
        *_compute_events(graph, placed, holders),
        *_message_events(graph, placed, holders, wiring),
        *_earlier_rows_events(graph, placed, holders, wiring),
        *_reduce_events(graph, placed, holders),
    ]
    lists: list[list[Action]] = [[] for _ in graph.actors]
    for _, parts in sorted(events, key=itemgetter(0)):
        for action, actors in parts:
            for index in actors:
                lists[index].append(action)
    return Plan(
        schedule=schedule,
        microbatches=microbatches,
        actors=tuple(
            ActorPlan(ranks=actor.ranks, actions=tuple(actions))
            for actor, actions in zip(graph.actors, lists, strict=True)
        ),
    )


def _compute_events(graph: ModuleGraph, placed: Sequence[Timed], holders: _Holders) -> Iterator[_Event]:
    numbers = {stage: number for number, stage in enumerate(graph.stages)}
    for timed in placed:
        if timed.kind in COMPUTATIONS:
            place = _place(timed.finish, numbers[timed.stage], is_backward=timed.kind != "forward")
            actors = holders[timed.stage] if timed.actors is None else timed.actors
            yield (*place, 0, timed.microbatches[0]), ((timed.action, actors),)


def _place(finish: float, stage: int, *, is_backward: bool) -> _EventKey:
    return (finish, _BACKWARD, -stage) if is_backward else (finish, _FORWARD, stage)


def _message_events(graph: ModuleGraph, placed: Sequence[Timed], holders: _Holders, wiring: Wiring) -> Iterator[_Event]:
    """Yield rows down each edge as its source's forward ends, and gradients up as its target's backward ends.

    Each microbatch of a pass has a message of its own: the other end may take them in passes of another size.
    """
    numbers = {stage: number for number, stage in enumerate(graph.stages)}
    ends: dict[tuple[StageId, bool], dict[int, float]] = {}
    """By stage and whether it is a backward, when each microbatch is computed on all actors."""
    for timed in placed:
        if timed.kind in ("forward", "backward", "input-gradient"):
            finishes = ends.setdefault((timed.stage, timed.kind != "forward"), {})
            for microbatch in timed.microbatches:
                finishes[microbatch] = max(timed.finish, finishes.get(microbatch, timed.finish))
    for number, edge in enumerate(graph.edges):
        ways = [] if wiring.is_handed_on(edge) else [(edge.source, edge.target, False)]
        if edge.gradient:
            ways.append((edge.target, edge.source, True))
        for sender, receiver, is_backward in ways:
            for microbatch, finish in ends.get((sender, is_backward), {}).items():
                place = (*_place(finish, numbers[sender], is_backward=is_backward), 1, number, microbatch)
                yield place, _message(edge, sender, receiver, microbatch, holders)


def _earlier_rows_events(
    graph: ModuleGraph, placed: Sequence[Timed], holders: _Holders, wiring: Wiring
) -> Iterator[_Event]:
    """Yield the messages of rows that the previous step made: each when the pass before the one that it feeds begins.

    Not all at once, so that receivers need not hold all of them; and not later, so that a sender with other work in
    between, which may take longer than estimated, still sends in time.
    """
    begins: dict[StageId, dict[tuple[int, ...], float]] = {}
    for timed in placed:
        if timed.kind == "forward":
            starts = begins.setdefault(timed.stage, {})
            starts[timed.microbatches] = min(timed.start, starts.get(timed.microbatches, timed.start))
    for number, edge in enumerate(graph.edges):
        if wiring.is_handed_on(edge):
            passes = sorted(begins[edge.target])
            for before, served in zip(passes[:1] + passes, passes, strict=False):
                begin = begins[edge.target][before]
                for microbatch in served:
                    message = _message(edge, edge.source, edge.target, microbatch, holders)
                    yield (begin, _EARLIER_ROWS, number, microbatch), message


def _message(edge: Edge, sender: StageId, receiver: StageId, microbatch: int, holders: _Holders) -> tuple[_Part, _Part]:
    """Return both halves of a message of one microbatch."""
    served, name = (microbatch,), edge.name
    receive = Action(kind="receive", module=receiver.module, stage=receiver.stage, microbatches=served, edge=name)
    send = Action(kind="send", module=sender.module, stage=sender.stage, microbatches=served, edge=name)
    return (receive, holders[receiver]), (send, holders[sender])


def _reduce_events(graph: ModuleGraph, placed: Sequence[Timed], holders: _Holders) -> Iterator[_Event]:
    """Yield a reduction of each stage that trains after its last backward, and before it that of a tied parameter.

    Each comes behind what its actors compute by then: they would wait for each other in the middle of that.
    """
    ends: dict[StageId, float] = {}
    for timed in placed:
        end = timed.start if timed.kind == "reduce" else timed.finish
        ends[timed.stage] = max(ends.get(timed.stage, 0), end)
    busy = _busy(graph, placed, holders)

    def behind(end: float, stages: Iterable[StageId]) -> float:
        return max(busy[actor].behind(end) for stage in stages for actor in holders[stage])

    for number, module in enumerate(graph.modules):
        if tied_stages := [StageId(module.name, stage) for stage in module.tied_stages]:
            end = behind(max(ends[stage] for stage in tied_stages), tied_stages)
            ends |= dict.fromkeys(tied_stages, end)
            for stage in tied_stages:
                action = _reduce(stage, edge=tied_edge(module.name))
                yield (end, _REDUCE, 0, number, stage.stage), ((action, holders[stage]),)
    for number, stage in enumerate(graph.stages):
        if graph.by_name[stage.module].trains[stage.stage]:
            yield (behind(ends[stage], [stage]), _REDUCE, 1, number), ((_reduce(stage), holders[stage]),)


@attrs.frozen
class _Busy:
    """When an actor computes: ``starts``, ascending, and for each when it has finished that and all before."""

    starts: Sequence[float]
    finishes: Sequence[float]

    def behind(self, end: float) -> float:
        """Return when the actor has finished what it begins before ``end``; no earlier than that."""
        begun = bisect_left(self.starts, end)
        return max(end, self.finishes[begun - 1]) if begun else end


def _busy(graph: ModuleGraph, placed: Sequence[Timed], holders: _Holders) -> list[_Busy]:
    spans: list[list[tuple[float, float]]] = [[] for _ in graph.actors]
    for timed in placed:
        if timed.kind in COMPUTATIONS:
            for actor in holders[timed.stage] if timed.actors is None else timed.actors:
                spans[actor].append((timed.start, timed.finish))
    return [
        _Busy([start for start, _ in own], list(accumulate((finish for _, finish in own), max)))
        for own in map(sorted, spans)
    ]


def _reduce(stage: StageId, *, edge: str | None = None) -> Action:
    return Action(kind="reduce", module=stage.module, stage=stage.stage, edge=edge)


def stages_to_sink(graph: ModuleGraph) -> Mapping[StageId, int]:
    """Return for each stage how many stages the longest path from it to a sink counts, itself included.

    So many microbatches in flight at the stage keep that path busy; more would only cost memory.
    """
    targets: dict[StageId, list[StageId]] = {}
    for edge in graph.edges:
        targets.setdefault(edge.source, []).append(edge.target)
    counts: dict[StageId, int] = {}
    for stage in reversed(graph.stages):
        counts[stage] = 1 + max((counts[target] for target in targets.get(stage, ())), default=0)
    return counts
