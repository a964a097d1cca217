"""The emulator by itself: it moves data, keeps channels in order, and finds what would hang or be mixed up."""

from __future__ import annotations

import attrs
import pytest

from mimo.hooks import PlanError
from mimo.schedule import Costs, Plan
from mimo.schedule.schedules.one_forward_one_backward import OneForwardOneBackward, generate
from mimo.schedule.testing import emulate
from mimo.topology import Edge, Grid, Module, ModuleGraph


def _graph() -> ModuleGraph:
    """Return a frozen ``v`` on ranks 0-1, feeding ``l`` on ranks 2-3."""
    return ModuleGraph(
        modules=(
            Module(grid=Grid(name="v", ranks=(0, 1), dp=2), trains=(False,)),
            Module(grid=Grid(name="l", ranks=(2, 3), dp=2), trains=(True,)),
        ),
        arrows=(("v", "l"),),
    )


def _swapped(plan: Plan, number: int, kind: str) -> Plan:
    """Return the plan with an actor's second action of a kind right before its first."""
    actions = list(plan.actors[number].actions)
    low, high = [index for index, action in enumerate(actions) if action.kind == kind][:2]
    actions.insert(low, actions.pop(high))
    actors = list(plan.actors)
    actors[number] = attrs.evolve(actors[number], actions=tuple(actions))
    return attrs.evolve(plan, actors=tuple(actors))


def test_it_counts_actions_buffers_and_microbatches() -> None:
    """Every rank does its list; buffers count from the post, microbatches until nobody needs them any more."""
    plan = generate(_graph(), 4, OneForwardOneBackward(), Costs.even(_graph()))
    result = emulate(plan, _graph())
    assert result.actions == 2 * 8 + 2 * 13
    assert result.receive_buffers == {0: 0, 1: 0, 2: 2, 3: 2}
    assert result.in_flight == {0: 1, 1: 1, 2: 1, 3: 1}


def test_the_same_seed_sees_the_same() -> None:
    """A run depends on nothing but the plan, the routes and the seed, and its result not even on the seed."""
    plan = generate(_graph(), 4, OneForwardOneBackward(), Costs.even(_graph()))
    assert emulate(plan, _graph(), seed=1) == emulate(plan, _graph(), seed=1) == emulate(plan, _graph(), seed=2)


def test_a_receive_filled_with_another_microbatch_is_found() -> None:
    """Channels have no tags: receives posted in the wrong order get the wrong rows, and the forward says so."""
    broken = _swapped(generate(_graph(), 2, OneForwardOneBackward(), Costs.even(_graph())), 1, "receive")
    text = r"forward of l.0, .*: expected rows of v.0, microbatch ([01]), from rank 0; .* got rows of v.0, microbatch "
    with pytest.raises(PlanError, match=text):
        emulate(broken, _graph())


def test_a_peer_without_rows_is_sent_nothing() -> None:
    """With no rows for anyone nobody waits: even receives in the wrong order do no harm."""
    broken = _swapped(generate(_graph(), 2, OneForwardOneBackward(), Costs.even(_graph())), 1, "receive")

    def nobody(edge: Edge, microbatch: int) -> list[tuple[int, int]]:
        return []

    assert emulate(broken, _graph(), peers=nobody).actions == 2 * 4 + 2 * 7


def test_a_missing_send_is_a_wait_for_ever() -> None:
    """The ranks that stay behind are named with what they wait for."""
    plan = generate(_graph(), 1, OneForwardOneBackward(), Costs.even(_graph()))
    silent = attrs.evolve(plan.actors[0], actions=plan.actors[0].actions[:1])
    text = r"plan, ranks 2-3: expected that every rank finishes, got rank 2 at action 1 .* waits for ranks 0-1; rank 3"
    with pytest.raises(PlanError, match=text):
        emulate(attrs.evolve(plan, actors=(silent, plan.actors[1])), _graph())


def test_a_rank_without_a_list_has_not_done_its_part() -> None:
    """That nobody waits does not mean that all is done."""
    graph = ModuleGraph(modules=(Module(grid=Grid(name="l", ranks=(0,)), trains=(False,)),), arrows=())
    with pytest.raises(PlanError, match=r"plan, rank 0: expected rows of l.0, microbatch 0, from rank 0, at the end"):
        emulate(Plan(schedule="by hand", microbatches=1, actors=()), graph)


def test_a_group_that_meets_for_different_things_is_found() -> None:
    """A tensor group's ranks that enter the collectives of two microbatches in different orders mix them up."""
    grids = [Grid(name="a", ranks=(0, 1), tp=2), Grid(name="b", ranks=(1,))]
    graph = ModuleGraph(modules=tuple(Module(grid=grid, trains=(False,)) for grid in grids), arrows=())
    plan = generate(graph, 2, OneForwardOneBackward(), Costs.even(graph))
    with pytest.raises(PlanError, match=r"expected one collective of all, got forward of a.0, microbatch [01] at rank"):
        emulate(_swapped(plan, 0, "forward"), graph)
