"""Steps of drawn layouts on ranks that do one thing at a time, as NCCL may have them; and what is wrong hangs there."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from serial_cluster import HangError
from serial_step import Fault, Overlap, Pairs, routing, run_step

from mimo.hooks import PlanError
from mimo.schedule import Action, ActorPlan, Costs, Plan, check
from mimo.schedule.schedules import interleaved
from mimo.schedule.schedules.one_forward_one_backward import OneForwardOneBackward, generate
from mimo.topology import Edge, Grid, Module, ModuleGraph

Cases = st.SearchStrategy[Any]
few = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
many = settings(few, max_examples=200)
FAULTS = 10
"""Of each kind."""
OVERLAPS: tuple[Overlap, ...] = ("none", "beside")


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
    """Whatever the schedule and the routes, with prefetch over three steps; and each row comes where it belongs.

    So do those in which optimizers sum gradients and gather parameters beside them, where these progress.
    """
    case, overlap = data.draw(cases), data.draw(st.sampled_from(OVERLAPS))
    run_step(case.graph, case.plan, draw_pairs(case.graph, seed), overlap=overlap)


@pytest.mark.soak
@many
@given(data=st.data(), seed=st.integers(0, 10**6))
def test_steps_of_many_drawn_layouts_finish(data: st.DataObject, seed: int, cases: Cases) -> None:
    """Two hundred, each with and without what optimizers overlap."""
    case = data.draw(cases)
    for overlap in OVERLAPS:
        run_step(case.graph, case.plan, draw_pairs(case.graph, seed), overlap=overlap)


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


@attrs.frozen
class Planted:
    """A fault, and what shows it.

    Args:
        fault: what is planted.
        waits: patterns, each of which is found in the text of a hang.
        rows: pattern of the text where rows come that belong elsewhere; empty where all ranks must hang.
    """

    fault: Fault
    waits: tuple[str, ...]
    rows: str = ""


def waiting(rank: int, peer: int, channel: str) -> str:
    """Return the pattern of a rank that waits for a peer, and perhaps for others too, on a channel."""
    return rf"rank {rank} waits for rank ([^;]*, )?{peer} at {channel} from"


def swapped(graph: ModuleGraph, plan: Plan, pairs: Pairs) -> Iterator[Planted]:
    """Yield faults in which one rank comes to two neighbouring batches with one peer in the wrong order.

    It waits in the later one for that peer, which waits for it in the earlier one.
    """
    for rank in graph.ranks:
        for one, other in itertools.pairwise(batches(graph, plan, pairs, rank)):
            if one.stop == other.first and one.peers & other.peers and one.channel != other.channel:
                actions = plan.actions_of(rank)
                order = (*actions[: one.first], *actions[other.first : other.stop], *actions[one.first : one.stop])
                fault = Fault(plans={rank: _with_list(plan, rank, (*order, *actions[other.stop :]))})
                channels = re.escape(one.channel), re.escape(other.channel)
                for peer in one.peers & other.peers:
                    yield Planted(fault, (waiting(rank, peer, channels[1]), waiting(peer, rank, channels[0])))


def split(graph: ModuleGraph, plan: Plan, pairs: Pairs) -> Iterator[Planted]:
    """Yield faults in which two ranks that send each other rows of a microbatch receive first, and then send.

    Each waits for what the other sends, in the first batch of that kind that the two have.
    """
    for rank in graph.ranks:
        firsts: dict[int, str] = {}
        for each in batches(graph, plan, pairs, rank):
            for peer in each.mutual:
                channel = re.escape(firsts.setdefault(peer, each.channel))
                waits = (f"{waiting(rank, peer, channel)} {peer} to", f"{waiting(peer, rank, channel)} {rank} to")
                yield Planted(Fault(splits=frozenset({rank, peer})), waits)


def left_out(graph: ModuleGraph, plan: Plan, pairs: Pairs) -> Iterator[Planted]:
    """Yield faults in which one rank forgets its first message with a peer.

    The peer waits for it there, or, where more messages follow, one of the two finds rows of another microbatch.
    """
    for rank in graph.ranks:
        for each in batches(graph, plan, pairs, rank):
            edge, channel = re.escape(each.channel.rpartition(" ")[0]), re.escape(each.channel)
            rows = rf"^{edge}, microbatch \d+: rows of another"
            for peer in each.peers:
                yield Planted(Fault(leaves_out={rank: (each.channel, peer)}), (waiting(peer, rank, channel),), rows)


@pytest.mark.parametrize("plant", [swapped, split, left_out], ids=lambda plant: plant.__name__)
@settings(few, max_examples=FAULTS)
@given(data=st.data(), seed=st.integers(0, 10**6))
def test_a_planted_fault_hangs_or_is_named(
    plant: Callable[..., Iterator[Planted]], data: st.DataObject, seed: int, cases: Cases
) -> None:
    """Nothing that is wrong gets through because something else happened to be there; where it is wrong is named."""
    case = data.draw(cases)
    pairs = draw_pairs(case.graph, seed)
    faults = list(plant(case.graph, case.plan, pairs))
    assume(faults)
    planted = random.Random(seed).choice(faults)
    with pytest.raises((HangError, AssertionError)) as caught:
        run_step(case.graph, case.plan, pairs, planted.fault)
    patterns = planted.waits if isinstance(caught.value, HangError) else (planted.rows,)
    assert all(pattern and re.search(pattern, str(caught.value)) for pattern in patterns), (patterns, caught.value)


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


def test_what_optimizers_overlap_needs_to_progress_beside_messages() -> None:
    """A sum that begins in a backward holds up a rank that its peer waits for before it comes to that backward."""
    modules = (
        Module(grid=Grid(name="lanes", ranks=(0, 1), dp=2), trains=(True,)),
        Module(grid=Grid(name="pipeline", ranks=(0, 1), pp=2), trains=(False,) * 4, chunks=2),
    )
    graph = ModuleGraph(modules=modules, arrows=())
    plan = interleaved.generate(graph, 1, interleaved.Interleaved(), Costs.even(graph))

    def pairs(edge: Edge, _microbatch: int) -> list[tuple[int, int]]:
        return list(zip(graph.stage_ranks(edge.source), graph.stage_ranks(edge.target), strict=True))

    for overlap in OVERLAPS:
        run_step(graph, plan, pairs, overlap=overlap)
    text = (
        r"^rank 0 waits for rank 1 at pipeline\.1-2 rows .*; rank 1 waits for rank 0 at sum 0 beside stage 0 of lanes"
    )
    with pytest.raises(HangError, match=text):
        run_step(graph, plan, pairs, overlap="holding")
