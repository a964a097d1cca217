"""The ``ahead`` schedule on graphs that one can draw, its budget, and its laws over random graphs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mimo.hooks import ConfigError
from mimo.schedule import Costs, Link, Plan, ScheduleSpec, Seconds, StageCost, check, peak_activations, simulate
from mimo.schedule.ahead.plugin import Ahead, generate
from mimo.schedule.schedules.one_forward_one_backward import OneForwardOneBackward
from mimo.schedule.schedules.one_forward_one_backward import generate as one_forward_one_backward
from mimo.schedule.testing import emulate
from mimo.topology import Grid, Module, ModuleGraph, StageId

Cases = st.SearchStrategy[Any]
few = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the schedule try few rules and search little, for laws that hold however good the plan is."""
    monkeypatch.setattr("mimo.schedule.ahead.rules._PLACED", 3_000)
    monkeypatch.setattr("mimo.schedule.ahead.rules._EFFORT", 20_000)


def _module(name: str, ranks: Sequence[int], *, trains: bool = True, batch_factor: int = 1, **sizes: int) -> Module:
    grid = Grid(name=name, ranks=ranks, **sizes)
    return Module(grid=grid, trains=(trains,) * grid.pp, batch_factor=batch_factor)


def _kept(graph: ModuleGraph, **bytes_: int) -> Costs:
    """Return costs in which a microbatch keeps so many bytes at each stage of a module."""
    even = Costs.even(graph)
    stages = {
        stage: attrs.evolve(
            cost, activations=bytes_.get(stage.module, 1), weight_inputs=bytes_.get(stage.module, 1) // 2
        )
        for stage, cost in even.stages.items()
    }
    return attrs.evolve(even, stages=stages).trained(graph)


def _colocated(*, trains: bool = True, batch_factor: int = 1) -> ModuleGraph:
    vision = _module("vision", range(4), dp=4, trains=trains, batch_factor=batch_factor)
    return ModuleGraph(modules=(vision, _module("language", range(4), pp=4)), arrows=(("vision", "language"),))


def _computations(plan: Plan, rank: int, module: str) -> list[tuple[str, tuple[int, ...]]]:
    kinds = ("forward", "backward", "input-gradient", "weight-gradient")
    return [
        (action.kind, action.microbatches)
        for action in plan.actions_of(rank)
        if action.module == module and action.kind in kinds
    ]


def test_a_pipeline_has_no_bubble_but_the_way_there_and_back() -> None:
    """Weight gradients fill all else: the last rank begins after the forwards before it, the first ends the step."""
    graph = ModuleGraph(modules=(_module("l", range(4), pp=4),), arrows=())
    costs = Costs.even(graph)
    assert simulate(generate(graph, 8, Ahead(), costs), graph, costs).seconds == 8 * 3 + 3


def test_an_encoder_on_all_ranks_works_in_the_gaps_of_each() -> None:
    """Ranks that never meet inside the encoder run it at times of their own, and the step is as short as its work."""
    graph = _colocated()
    costs = Costs.even(graph)
    plan = generate(graph, 8, Ahead(), costs)
    usual = simulate(one_forward_one_backward(graph, 8, OneForwardOneBackward(), costs), graph, costs)
    assert simulate(plan, graph, costs).seconds <= 8 * 6 + 2 < usual.seconds
    lists = [[action.module for action in plan.actions_of(rank) if action.kind == "forward"] for rank in graph.ranks]
    assert len(set(map(tuple, lists))) > 1


def test_a_frozen_encoder_runs_ahead_and_never_back() -> None:
    """Its passes serve two microbatches each and are all forwards; on its own rank it never waits."""
    vision = _module("vision", (0,), trains=False, batch_factor=2)
    graph = ModuleGraph(modules=(vision, _module("language", (1,))), arrows=(("vision", "language"),))
    plan = generate(graph, 5, Ahead(), Costs.even(graph))
    check(plan, graph)
    emulate(plan, graph)
    assert _computations(plan, 0, "vision") == [("forward", (0, 1)), ("forward", (2, 3)), ("forward", (4,))]


def test_a_backward_stays_whole_where_nothing_gains_by_its_parts() -> None:
    """A stage that hands no gradient on does its second part right behind the first, as one action."""
    graph = ModuleGraph(modules=(_module("l", (0,)),), arrows=())
    plan = generate(graph, 3, Ahead(), Costs.even(graph))
    assert {kind for kind, _ in _computations(plan, 0, "l")} == {"forward", "backward"}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("batch_factor", [1, 2])
@pytest.mark.parametrize("trains", [True, False])
def test_a_budget_holds_and_a_larger_one_is_no_slower(trains: bool, batch_factor: int) -> None:
    """No rank keeps more bytes than allowed; with more of them the step takes less time or as much."""
    graph = _colocated(trains=trains, batch_factor=batch_factor)
    costs = _kept(graph, vision=30, language=10)
    seconds = []
    for budget in (30 * batch_factor + 10, 150, 0):
        plan = generate(graph, 6, Ahead(budget=budget), costs)
        check(plan, graph, max_bytes=dict.fromkeys(graph.ranks, budget) if budget else None, costs=costs)
        emulate(plan, graph)
        seconds.append(simulate(plan, graph, costs).seconds)
    assert seconds == sorted(seconds, reverse=True)


def test_a_budget_that_is_too_small_is_refused_with_the_smallest_it_plans_with() -> None:
    """A pass of the encoder and a microbatch of the language model have to be there at once; recomputing adds to it."""
    graph = _colocated(batch_factor=2)
    costs = _kept(graph, vision=30, language=10)
    with pytest.raises(ConfigError, match=r"schedule\.budget: expected 70 bytes or more, .* got 69.* Set it to 70"):
        generate(graph, 4, Ahead(budget=69), costs)
    plan = generate(graph, 4, Ahead(budget=70), costs)
    assert {peak.bytes for peak in peak_activations(plan, graph, costs).values()} == {70}
    again = {stage: attrs.evolve(cost, recomputed=5) for stage, cost in costs.stages.items()}
    with pytest.raises(ConfigError, match=r"expected 75 bytes or more"):
        generate(graph, 4, Ahead(budget=74), attrs.evolve(costs, stages=again))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("budget", [0, 30, 31])
@pytest.mark.parametrize("microbatches", [3, 4, 7])
def test_a_source_runs_ahead_by_a_pass_of_what_it_feeds(microbatches: int, budget: int) -> None:
    """Three microbatches of the first module are there for one pass of the second, in flight and within the budget."""
    modules = (_module("a", (0,)), _module("b", (1,), batch_factor=3))
    graph = ModuleGraph(modules=modules, arrows=(("a", "b"),))
    costs = _kept(graph, a=10, b=1)
    plan = generate(graph, microbatches, Ahead(budget=budget), costs)
    check(plan, graph, max_bytes=dict.fromkeys(graph.ranks, budget) if budget else None, costs=costs)
    emulate(plan, graph)
    with pytest.raises(ConfigError, match=r"expected 30 bytes or more, which ahead reserves"):
        generate(graph, microbatches, Ahead(budget=29), costs)


def test_rows_of_a_frozen_stage_that_are_on_their_way_are_not_in_the_budget() -> None:
    """A rank lets go of them when they are sent; the simulator counts them until they have arrived."""
    graph = ModuleGraph(
        modules=(_module("vision", (0,), trains=False), _module("language", (1,))), arrows=(("vision", "language"),)
    )
    edge = graph.edges[0].name
    costs = attrs.evolve(_kept(graph, vision=10, language=1), message_bytes={edge: 1}, link=Link(latency=5))
    plan = generate(graph, 3, Ahead(budget=10), costs)
    assert peak_activations(plan, graph, costs)[0].bytes == 10
    assert simulate(plan, graph, costs).peak_total[0] > 10


def test_what_is_no_budget_is_refused() -> None:
    """Bytes are not negative, and a step has a microbatch."""
    graph = _colocated()
    with pytest.raises(ConfigError, match=r"schedule\.budget: expected bytes, or 0 for no limit, got -1"):
        generate(graph, 4, Ahead(budget=-1), Costs.even(graph))
    with pytest.raises(ConfigError, match=r"microbatches: expected 1 or more in a step, got 0"):
        generate(graph, 0, Ahead(), Costs.even(graph))


_PLAN = """
from mimo.schedule import Costs
from mimo.schedule.ahead import rules
from mimo.schedule.ahead.plugin import Ahead, generate
from mimo.topology import Grid, Module, ModuleGraph

rules._EFFORT = 20_000
grids = (Grid(name="v", ranks=range(4), dp=4), Grid(name="a", ranks=(1, 2), dp=2), Grid(name="l", ranks=range(4), pp=4))
graph = ModuleGraph(
    modules=tuple(Module(grid=grid, trains=(True,) * grid.pp, batch_factor=2 - grid.pp // 4) for grid in grids),
    arrows=(("v", "l"), ("a", "l")),
)
print(generate(graph, 4, Ahead(), Costs.even(graph)))
"""


def test_the_same_step_gets_the_same_plan() -> None:
    """Neither clocks nor random seeds from outside have a say, that of hashes included."""
    plans = [
        subprocess.run(  # noqa: S603 - our own interpreter and text
            [sys.executable, "-c", _PLAN],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2", "3")
    ]
    assert "input-gradient" in plans[0]
    assert len(set(plans)) == 1


def test_slow_messages_are_worked_around() -> None:
    """While rows travel, other microbatches are computed: ten messages of a forward's time cost less than three."""
    graph = ModuleGraph(modules=(_module("l", (0, 1), pp=2),), arrows=())
    costs = attrs.evolve(Costs.even(graph), message_bytes={"l.0-1": 1}, link=Link(latency=1))
    assert simulate(generate(graph, 5, Ahead(), costs), graph, costs).seconds <= 5 * 3 + 3


@pytest.mark.parametrize("gathers", [False, True])
def test_lanes_that_complete_gradients_together_do_so_in_one_order(*, gathers: bool) -> None:
    """One lane has another module's work to do beside: its weight gradients may then wait only where nobody meets."""
    vision = attrs.evolve(_module("vision", (0, 1), dp=2), gathers=gathers)
    graph = ModuleGraph(modules=(vision, _module("language", (1,))), arrows=(("vision", "language"),))
    plan = generate(graph, 2, Ahead(), Costs.even(graph))
    check(plan, graph)
    first, second = (_computations(plan, rank, "vision") for rank in (0, 1))
    assert (first == second) == gathers


@pytest.mark.usefixtures("quick")
@settings(few, max_examples=40)
@given(data=st.data(), seed=st.integers(0, 10**6), tight=st.booleans())
def test_plans_of_random_graphs_are_proved_and_finish(
    data: st.DataObject, seed: int, tight: bool, cases: Cases
) -> None:
    """Whatever the graph, the checker accepts the plan within its budget, and ranks finish in any order."""
    graph, microbatches = (case := data.draw(cases)).graph, case.plan.microbatches
    costs = _kept(graph, **{module.name: 2 + number for number, module in enumerate(graph.modules)})
    budget = 0
    if tight:
        with pytest.raises(ConfigError) as refused:
            generate(graph, microbatches, Ahead(budget=1), costs)
        budget = int(str(refused.value).split("expected ")[1].split()[0])
    plan = generate(graph, microbatches, Ahead(budget=budget), costs)
    check(plan, graph, max_bytes=dict.fromkeys(graph.ranks, budget) if budget else None, costs=costs)
    emulate(plan, graph, seed=seed)


@few
@given(data=st.data())
def test_without_training_there_are_forwards_alone(data: st.DataObject, cases: Cases) -> None:
    """Evaluation computes every forward, and neither backwards nor reductions."""
    graph = data.draw(cases).graph.without_training()
    plan = generate(graph, 3, Ahead(), Costs.even(graph))
    check(plan, graph)
    assert {action.kind for actor in plan.actors for action in actor.actions} <= {"forward", "send", "receive"}


def test_stages_that_take_no_time_are_placed_too() -> None:
    """Costs may be 0, as of a part that nobody has measured: the plan is still whole."""
    graph = _colocated()
    nothing = Costs(stages={stage: StageCost(forward=Seconds()) for stage in graph.stages})
    plan = generate(graph, 3, Ahead(), nothing)
    check(plan, graph)
    emulate(plan, graph)


@pytest.mark.usefixtures("quick")
def test_a_thousand_ranks_are_planned() -> None:
    """64 microbatches over 1,024 ranks in 16 stages with an encoder on all of them come close to the work there is."""
    graph = ModuleGraph(
        modules=(_module("v", range(1024), dp=1024), _module("l", range(1024), pp=16, tp=8, dp=8)), arrows=(("v", "l"),)
    )
    costs = _kept(graph, v=2, l=1)
    plan = generate(graph, 64, Ahead(budget=100), costs)
    check(plan, graph, max_bytes=dict.fromkeys(graph.ranks, 100), costs=costs)
    assert simulate(plan, graph, costs).seconds <= 1.05 * 64 * 6
    assert {action.stage_id for action in plan.actions_of(0)} == {StageId("v", 0), StageId("l", 0)}


def test_it_is_registered_as_a_plugin() -> None:
    """The entry point leads to the hook that returns its spec."""
    (entry,) = entry_points(group="mimo.schedules", name="ahead")
    (spec,) = entry.load().mimo_register_schedules()
    assert spec == ScheduleSpec(name="ahead", config=Ahead, generate=generate)
