"""Steps of drawn layouts on ranks that do one thing at a time, as NCCL may have them; and what is wrong hangs there."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from serial_cluster import HangError
from serial_step import Fault, Pairs, routing, run_step

from mimo.hooks import PlanError
from mimo.schedule import Action, ActorPlan, Costs, Plan, check
from mimo.schedule.schedules.one_forward_one_backward import OneForwardOneBackward, generate
from mimo.topology import Edge, Grid, Module, ModuleGraph

Cases = st.SearchStrategy[Any]
few = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
many = settings(few, max_examples=200)
FAULTS = 10
"""Of each kind."""


def draw_pairs(graph: ModuleGraph, seed: int) -> Pairs:
    """Draw who exchanges rows: within a module each rank and its like or, in some microbatches, nobody; else anyone."""
    names = {module.name: module for module in graph.modules}

    def pairs(edge: Edge, microbatch: int) -> list[tuple[int, int]]:
        choice = random.Random(f"{seed} {edge.name} {microbatch}")
        sources, targets = graph.stage_ranks(edge.source), graph.stage_ranks(edge.target)
        if not edge.is_boundary or names[edge.target.module].projector_of == edge.source.module:
            return list(zip(sources, targets, strict=True)) if choice.random() < 0.9 else []
        share = choice.choice([0.0, 0.5, 0.8, 1.0])
        return [pair for pair in itertools.product(sources, targets) if choice.random() < share]

    return pairs


@few
@given(data=st.data(), seed=st.integers(0, 10**6))
def test_steps_of_drawn_layouts_finish(data: st.DataObject, seed: int, cases: Cases) -> None:
    """Whatever the schedule and the routes, with prefetch over three steps; and each row comes where it belongs."""
    case = data.draw(cases)
    run_step(case.graph, case.plan, draw_pairs(case.graph, seed))


@pytest.mark.soak
@many
@given(data=st.data(), seed=st.integers(0, 10**6))
def test_steps_of_many_drawn_layouts_finish(data: st.DataObject, seed: int, cases: Cases) -> None:
    """Two hundred."""
    case = data.draw(cases)
    run_step(case.graph, case.plan, draw_pairs(case.graph, seed))


@attrs.frozen
class Batch:
    """A batch of one rank: where it stands in the list, its channel, its peers, and those with messages both ways."""

    first: int
    stop: int
    channel: str
    peers: frozenset[int]
    mutual: frozenset[int]


def batches(graph: ModuleGraph, plan: Plan, pairs: Pairs, rank: int) -> Iterator[Batch]:
    """Yield the batches of a rank's list that have peers."""
    route, edges = routing(pairs, graph, plan.microbatches, rank), {edge.name: edge for edge in graph.edges}
    actions = plan.actions_of(rank)
    index = 0
    while index < len(actions):
        action, first = actions[index], index
        index += 1
        if action.kind not in ("send", "receive"):
            continue
        if action.kind == "receive" and index < len(actions) and _is_half(action, actions[index]):
            index += 1
        edge = edges[action.edge or ""]
        forward = (action.kind == "send") == (action.stage_id == edge.source)
        (microbatch,) = action.microbatches
        found = route(edge.name, microbatch)
        ways = [{piece.peer for piece in pieces} - {rank} for pieces in (found.sends, found.receives)]
        halves = {each.kind for each in actions[first:index]}
        if len(halves) == 1:  # this rank is at one end
            ways = [ways[(action.kind == "send") != forward]]
        peers, mutual = frozenset().union(*ways), frozenset[int]().union(ways[0]).intersection(*ways[1:])
        if peers:
            name = f"{edge.name} {'rows' if forward else 'gradients'}"
            yield Batch(first, index, name, peers, mutual if len(halves) > 1 else frozenset())


def _is_half(receive: Action, send: Action) -> bool:
    return send.kind == "send" and (send.edge, send.microbatches) == (receive.edge, receive.microbatches)


def _with_list(plan: Plan, rank: int, actions: Sequence[Action]) -> Plan:
    """Return a plan in which one rank has a list of its own."""
    others = [attrs.evolve(actor, ranks=tuple(set(actor.ranks) - {rank})) for actor in plan.actors]
    return attrs.evolve(plan, actors=(ActorPlan(ranks=(rank,), actions=tuple(actions)), *others))


def swapped(graph: ModuleGraph, plan: Plan, pairs: Pairs) -> Iterator[Fault]:
    """Yield faults in which one rank comes to two neighbouring batches with one peer in the wrong order."""
    for rank in graph.ranks:
        for one, other in itertools.pairwise(batches(graph, plan, pairs, rank)):
            if one.stop == other.first and one.peers & other.peers and one.channel != other.channel:
                actions = plan.actions_of(rank)
                order = (*actions[: one.first], *actions[other.first : other.stop], *actions[one.first : one.stop])
                yield Fault(plans={rank: _with_list(plan, rank, (*order, *actions[other.stop :]))})


def split(graph: ModuleGraph, plan: Plan, pairs: Pairs) -> Iterator[Fault]:
    """Yield faults in which two ranks that send each other rows of a microbatch receive first, and then send."""
    for rank in graph.ranks:
        for each in batches(graph, plan, pairs, rank):
            yield from (Fault(splits=frozenset({rank, peer})) for peer in each.mutual)


def left_out(graph: ModuleGraph, plan: Plan, pairs: Pairs) -> Iterator[Fault]:
    """Yield faults in which one rank forgets its first message with a peer."""
    for rank in graph.ranks:
        for each in batches(graph, plan, pairs, rank):
            yield from (Fault(leaves_out={rank: (each.channel, peer)}) for peer in each.peers)


@pytest.mark.parametrize("plant", [swapped, split, left_out], ids=lambda plant: plant.__name__)
@settings(few, max_examples=FAULTS)
@given(data=st.data(), seed=st.integers(0, 10**6))
def test_a_planted_fault_hangs_or_is_named(
    plant: Callable[..., Iterator[Fault]], data: st.DataObject, seed: int, cases: Cases
) -> None:
    """Nothing that is wrong gets through because something else happened to be there."""
    case = data.draw(cases)
    pairs = draw_pairs(case.graph, seed)
    faults = list(plant(case.graph, case.plan, pairs))
    assume(faults)
    with pytest.raises((HangError, AssertionError), match=r"waits for rank|rows"):
        run_step(case.graph, case.plan, pairs, random.Random(seed).choice(faults))


def _everybody(edge: Edge, _microbatch: int) -> list[tuple[int, int]]:
    """Return all pairs of the two lanes at either end, or a pipeline's."""
    return list(itertools.product((0, 1), (0, 1))) if edge.is_boundary else [(0, 1)]


def _generate(*modules: Module) -> tuple[ModuleGraph, Plan]:
    arrows = ((modules[0].name, modules[1].name),) if modules[1:] else ()
    graph = ModuleGraph(modules=modules, arrows=arrows)
    return graph, generate(graph, 3, OneForwardOneBackward(), Costs.even(graph))


def test_messages_outside_of_batches_hang() -> None:
    """Two ranks at both ends of an edge, each of which receives what the other has to send behind its own receive."""
    grids = [Grid(name=name, ranks=(0, 1), dp=2) for name in ("vision", "language")]
    graph, plan = _generate(*(Module(grid=grid, trains=(True,)) for grid in grids))
    run_step(graph, plan, _everybody)
    text = (
        r"^rank 0 waits for rank 1 at vision->language rows from 1 to 0; "
        r"rank 1 waits for rank 0 at vision->language rows from 0 to 1$"
    )
    with pytest.raises(HangError, match=text):
        run_step(graph, plan, _everybody, Fault(splits=frozenset({0, 1})))


def test_a_receive_that_is_posted_at_will_hangs() -> None:
    """Of a gradient, before the forward that ends before it comes: the other stage waits for that forward's rows."""
    graph, plan = _generate(Module(grid=Grid(name="language", ranks=(0, 1), pp=2), trains=(True, True)))
    run_step(graph, plan, _everybody)
    actions = list(plan.actions_of(0))
    kinds = [action.kind for action in actions]
    actions.insert(kinds.index("forward", 1), actions.pop(kinds.index("receive")))
    early = _with_list(plan, 0, actions)
    with pytest.raises(
        HangError, match=r"rank 0 waits for rank 1 at language.0-1 gradients .*; rank 1 waits for rank 0"
    ):
        run_step(graph, plan, _everybody, Fault(plans={0: early}))
    with pytest.raises(PlanError, match="expected no circle of waiting"):
        check(attrs.evolve(early, actors=tuple(actor for actor in early.actors if actor.ranks)), graph)
