"""From computations placed in time to a plan: messages and reductions join them in one total order, cut by actor.

The one idea: every computation, message and reduction is an event that all its actors meet at the same place of one
global order. An actor's list is that order filtered by the actor, so no circle of waiting can arise, even were every
message a rendezvous. Posting receives earlier afterwards can only end waits sooner, because a post itself never waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs

from mimo.schedule._plan import Action, ActionKind, ActorPlan, Plan, tied_edge
from mimo.topology import Edge, ModuleGraph, StageId

COMPUTATIONS = frozenset({"forward", "backward", "input-gradient", "weight-gradient"})
_MESSAGE, _REDUCE, _COMPUTE = range(3)
"""The order of events at one time: what is finished moves on before anything new begins."""


@attrs.frozen(kw_only=True)
class Timed:
    """A computation of one stage, from ``start`` to ``finish`` in any unit of time, on every actor that holds it."""

    kind: ActionKind
    stage: StageId
    microbatches: tuple[int, ...]
    start: float
    finish: float

    @property
    def action(self) -> Action:
        """The action that the plan lists for it."""
        return Action(kind=self.kind, module=self.stage.module, stage=self.stage.stage, microbatches=self.microbatches)


@attrs.frozen(kw_only=True)
class _Event:
    """What happens at one place of the total order; ``key`` is that place, and ``actions`` are done in this order."""

    key: tuple[float, ...]
    actions: tuple[Action, ...]


def assemble(schedule: str, graph: ModuleGraph, microbatches: int, computations: Iterable[Timed]) -> Plan:
    """Return the plan that runs ``computations`` with all messages and reductions that they call for.

    Args:
        schedule: name of the schedule that placed them.
        graph: the module graph.
        microbatches: number of microbatches in the step.
        computations: every computation of the step. Two on one actor do not overlap in time, each starts no earlier
            than what it needs has finished, and those of one stage and kind are in the order of their microbatches.
    """
    placed = list(computations)
    events = [*_compute_events(graph, placed), *_message_events(graph, placed), *_reduce_events(graph, placed)]
    holders: dict[StageId, list[int]] = {}
    for index, actor in enumerate(graph.actors):
        for stage in actor.stages:
            holders.setdefault(stage, []).append(index)
    lists: list[list[Action]] = [[] for _ in graph.actors]
    for event in sorted(events, key=lambda event: event.key):
        for action in event.actions:
            for index in holders[action.stage_id]:
                lists[index].append(action)
    return Plan(
        schedule=schedule,
        microbatches=microbatches,
        actors=tuple(
            ActorPlan(ranks=actor.ranks, actions=_receive_early(actions))
            for actor, actions in zip(graph.actors, lists, strict=True)
        ),
    )


def _compute_events(graph: ModuleGraph, placed: Sequence[Timed]) -> Iterator[_Event]:
    numbers = {stage: number for number, stage in enumerate(graph.stages)}
    for timed in placed:
        key = (timed.start, _COMPUTE, numbers[timed.stage], timed.microbatches[0])
        yield _Event(key=key, actions=(timed.action,))


def _message_events(graph: ModuleGraph, placed: Sequence[Timed]) -> Iterator[_Event]:
    """Yield rows down each edge as its source's forward ends, and gradients up as its target's backward ends."""
    down: dict[StageId, list[tuple[int, Edge]]] = {}
    up: dict[StageId, list[tuple[int, Edge]]] = {}
    for number, edge in enumerate(graph.edges):
        down.setdefault(edge.source, []).append((number, edge))
        if edge.gradient:
            up.setdefault(edge.target, []).append((number, edge))
    for timed in placed:
        if timed.kind == "forward":
            for number, edge in down.get(timed.stage, ()):
                yield from _messages(timed, edge, number, receiver=edge.target)
        elif timed.kind in ("backward", "input-gradient"):
            for number, edge in up.get(timed.stage, ()):
                yield from _messages(timed, edge, number, receiver=edge.source)


def _messages(timed: Timed, edge: Edge, number: int, *, receiver: StageId) -> Iterator[_Event]:
    """Yield one message for each microbatch of a pass: the other end may take them in passes of its own."""
    for microbatch in timed.microbatches:
        send = attrs.evolve(timed.action, kind="send", edge=edge.name, microbatches=(microbatch,))
        receive = attrs.evolve(send, kind="receive", module=receiver.module, stage=receiver.stage)
        # The receive comes first: an actor that is both ends must have posted it before its own send waits for it.
        yield _Event(key=(timed.finish, _MESSAGE, number, microbatch), actions=(receive, send))


def _reduce_events(graph: ModuleGraph, placed: Sequence[Timed]) -> Iterator[_Event]:
    """Yield a reduction of each stage that trains after its last backward, and before it that of a tied parameter."""
    ends: dict[StageId, float] = {}
    for timed in placed:
        ends[timed.stage] = max(ends.get(timed.stage, 0), timed.finish)
    for number, module in enumerate(graph.modules):
        if tied_stages := [StageId(module.name, stage) for stage in module.tied_stages]:
            end = max(ends[stage] for stage in tied_stages)
            ends |= dict.fromkeys(tied_stages, end)
            actions = tuple(_reduce(stage, edge=tied_edge(module.name)) for stage in tied_stages)
            yield _Event(key=(end, _REDUCE, 0, number), actions=actions)
    for number, stage in enumerate(graph.stages):
        if graph.by_name[stage.module].trains[stage.stage]:
            yield _Event(key=(ends[stage], _REDUCE, 1, number), actions=(_reduce(stage),))


def _reduce(stage: StageId, *, edge: str | None = None) -> Action:
    return Action(kind="reduce", module=stage.module, stage=stage.stage, edge=edge)


def _receive_early(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Move each receive to before the computation that precedes it, so that rows arrive while the actor computes.

    The order among the receives of a channel stays. At most one buffer more per channel is posted at any time: the one
    that this computation is still to use. Gradients never come before their own forward, so their receives stay
    behind it: whoever posts them already holds the rows that they belong to.
    """
    early: list[list[Action]] = [[]]
    rest: list[list[Action]] = [[]]  # rest[k] opens with the k-th computation, rest[0] precedes all
    for action in actions:
        if action.kind in COMPUTATIONS:
            early.append([])
            rest.append([action])
        elif action.kind == "receive" and not _belongs_to(action, rest[-1][:1]):
            early[-1].append(action)
        else:
            rest[-1].append(action)
    return tuple(action for before, after in zip(early, rest, strict=True) for action in (*before, *after))


def _belongs_to(receive: Action, computation: Sequence[Action]) -> bool:
    return any(
        done.kind == "forward"
        and done.stage_id == receive.stage_id
        and set(receive.microbatches) <= set(done.microbatches)
        for done in computation
    )


def stages_to_sink(graph: ModuleGraph) -> Mapping[StageId, int]:
    """Return for each stage how many stages the longest path from it to a sink counts, itself included.

    As many microbatches must be in flight at the stage to keep that path busy; more would only cost memory.
    """
    targets: dict[StageId, list[StageId]] = {}
    for edge in graph.edges:
        targets.setdefault(edge.source, []).append(edge.target)
    found: dict[StageId, int] = {}
    for stage in reversed(graph.stages):
        found[stage] = 1 + max((found[target] for target in targets.get(stage, ())), default=0)
    return found
