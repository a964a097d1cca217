"""From computations placed in time to a plan: adds messages and reductions in one total order, then splits it by actor.

The one idea: every computation, message and reduction is an event with one place in a global
order for all its actors. An actor's list is that order filtered by the actor, so no circle of waiting can arise, even
if every message were a rendezvous. Posting receives earlier afterwards can only shorten waits, because a post never
waits.
Actors that hold a stage without collectives between them may compute a pass at different times: each sends when it is
done, and the receivers post before the first send.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter

import attrs

from mimo.hooks import PlanError
from mimo.schedule.plan.plan import Action, ActionKind, ActorPlan, Plan, tied_edge
from mimo.schedule.plan.texts import action_text
from mimo.schedule.plan.wiring import Wiring
from mimo.topology import Edge, ModuleGraph, StageId

COMPUTATIONS = frozenset({"forward", "backward", "input-gradient", "weight-gradient"})
_MESSAGE, _REDUCE, _COMPUTE = range(3)
"""The order of events at one time: finished results are sent before anything new begins."""


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
_Event = tuple[tuple[float, ...], Action, Sequence[int]]
"""Its key in the total order, the action, and the actors that do it."""


def assemble(schedule: str, graph: ModuleGraph, microbatches: int, computations: Iterable[Timed]) -> Plan:
    """Return the plan that runs ``computations``, with all messages and reductions that they need.

    Args:
        schedule: name of the schedule that placed them.
        graph: the module graph.
        microbatches: number of microbatches in the step.
        computations: every computation of the step. Two on one actor do not overlap in time, each starts no earlier
            than what it needs has finished, and those of one stage and kind are, on each actor, in the order of their
            microbatches. Each takes some time, however little: results of one moment are sent before anything
            begins.

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
    for _, action, actors in sorted(events, key=itemgetter(0)):
        for index in actors:
            lists[index].append(action)
    return Plan(
        schedule=schedule,
        microbatches=microbatches,
        actors=tuple(
            ActorPlan(ranks=actor.ranks, actions=_receive_early(actions))
            for actor, actions in zip(graph.actors, lists, strict=True)
        ),
    )


def _compute_events(graph: ModuleGraph, placed: Sequence[Timed], holders: _Holders) -> Iterator[_Event]:
    numbers = {stage: number for number, stage in enumerate(graph.stages)}
    for timed in placed:
        if timed.kind in COMPUTATIONS:
            key = (timed.start, _COMPUTE, numbers[timed.stage], timed.microbatches[0])
            yield key, timed.action, holders[timed.stage] if timed.actors is None else timed.actors


def _message_events(graph: ModuleGraph, placed: Sequence[Timed], holders: _Holders, wiring: Wiring) -> Iterator[_Event]:
    """Yield rows down each edge as its source's forward ends, and gradients up as its target's backward ends.

    Each microbatch of a pass has a message of its own: the other end may take them in passes of another size.
    """
    down: dict[StageId, list[tuple[int, Edge]]] = {}
    up: dict[StageId, list[tuple[int, Edge]]] = {}
    for number, edge in enumerate(graph.edges):
        if not wiring.is_handed_on(edge):
            down.setdefault(edge.source, []).append((number, edge))
        if edge.gradient:
            up.setdefault(edge.target, []).append((number, edge))
    ways = {"forward": down, "backward": up, "input-gradient": up}
    posted: set[tuple[int, StageId, int]] = set()
    for timed in sorted(placed, key=attrgetter("finish")):
        way = ways.get(timed.kind, {})
        for number, edge in way.get(timed.stage, ()):
            receiver = edge.target if way is down else edge.source
            senders = holders[timed.stage] if timed.actors is None else timed.actors
            for microbatch in timed.microbatches:
                # An actor that is both ends must have posted the receive before its own send waits for it.
                if (number, receiver, microbatch) not in posted:
                    posted.add((number, receiver, microbatch))
                    receive = _message("receive", receiver, edge, microbatch)
                    yield (timed.finish, _MESSAGE, number, microbatch, 0), receive, holders[receiver]
                yield (
                    (timed.finish, _MESSAGE, number, microbatch, 1),
                    _message("send", timed.stage, edge, microbatch),
                    senders,
                )


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
                for microbatch in served:
                    place = (begins[edge.target][before], _MESSAGE, number, microbatch)
                    receive = _message("receive", edge.target, edge, microbatch)
                    yield (*place, 0), receive, holders[edge.target]
                    yield (*place, 1), _message("send", edge.source, edge, microbatch), holders[edge.source]


def _message(kind: ActionKind, stage: StageId, edge: Edge, microbatch: int) -> Action:
    return Action(kind=kind, module=stage.module, stage=stage.stage, microbatches=(microbatch,), edge=edge.name)


def _reduce_events(graph: ModuleGraph, placed: Sequence[Timed], holders: _Holders) -> Iterator[_Event]:
    """Yield a reduction of each stage that trains after its last backward, and before it that of a tied parameter."""
    ends: dict[StageId, float] = {}
    for timed in placed:
        end = timed.start if timed.kind == "reduce" else timed.finish
        ends[timed.stage] = max(ends.get(timed.stage, 0), end)
    for number, module in enumerate(graph.modules):
        if tied_stages := [StageId(module.name, stage) for stage in module.tied_stages]:
            end = max(ends[stage] for stage in tied_stages)
            ends |= dict.fromkeys(tied_stages, end)
            for stage in tied_stages:
                action = _reduce(stage, edge=tied_edge(module.name))
                yield (end, _REDUCE, 0, number, stage.stage), action, holders[stage]
    for number, stage in enumerate(graph.stages):
        if graph.by_name[stage.module].trains[stage.stage]:
            yield (ends[stage], _REDUCE, 1, number), _reduce(stage), holders[stage]


def _reduce(stage: StageId, *, edge: str | None = None) -> Action:
    return Action(kind="reduce", module=stage.module, stage=stage.stage, edge=edge)


def _receive_early(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Move each receive to before the computation that precedes it, so that rows arrive while the actor computes.

    The order among the receives of a channel stays. At most one more buffer per channel is posted at any time: the
    one that this computation will use. A receive of gradients stays behind its own forward, since gradients never come
    earlier.
    """
    result: list[Action] = []
    early: list[Action] = []
    rest: list[Action] = []  # opens with a computation, but for what precedes all
    for action in actions:
        if action.kind in COMPUTATIONS:
            result += early
            result += rest
            early, rest = [], [action]
        elif action.kind == "receive" and not (rest and _belongs_to(action, rest[0])):
            early.append(action)
        else:
            rest.append(action)
    return (*result, *early, *rest)


def _belongs_to(receive: Action, done: Action) -> bool:
    return (
        done.kind == "forward"
        and (done.stage, done.module) == (receive.stage, receive.module)
        and set(receive.microbatches) <= set(done.microbatches)
    )


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
