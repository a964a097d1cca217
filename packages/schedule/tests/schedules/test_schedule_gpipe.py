"""GPipe plans on graphs that one can draw: all forwards, then all backwards."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mimo.hooks import ConfigError
from mimo.schedule import Costs, check, in_flight, simulate
from mimo.schedule.schedules.gpipe import GPipe, generate
from mimo.schedule.testing import emulate
from mimo.topology import Grid, Module, ModuleGraph, StageId


def _pipeline(ranks: int, chunks: int = 1) -> ModuleGraph:
    grid = Grid(name="l", ranks=range(ranks), pp=ranks)
    return ModuleGraph(modules=(Module(grid=grid, trains=(True,) * ranks * chunks, chunks=chunks),), arrows=())


def _calls(stages: int) -> int:
    """Return how many functions are called to generate a plan of a step of one microbatch."""
    graph, calls = _pipeline(stages), 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        generate(graph, 1, GPipe(), Costs.even(graph))
    finally:
        sys.setprofile(before)
    return calls


def test_work_is_linear_in_the_stages() -> None:
    """Of a long pipeline: four times the stages, about four times the calls."""
    assert _calls(256) < 5 * _calls(64)


def test_the_order() -> None:
    """Each rank does the forwards of all microbatches, and then the backwards in the same order."""
    plan = generate(_pipeline(2), 3, GPipe(), Costs.even(_pipeline(2)))
    for rank in (0, 1):
        order = [
            (action.kind, action.microbatches[0])
            for action in plan.actions_of(rank)
            if action.kind in ("forward", "backward")
        ]
        assert order == [(kind, microbatch) for kind in ("forward", "backward") for microbatch in range(3)]
    assert set(in_flight(plan).values()) == {3}


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_stage_goes_forward_again(data: st.DataObject, cases_of: Callable[[str], st.SearchStrategy[Any]]) -> None:
    """In any graph a stage has gone forward with all microbatches before it goes back with the first."""
    case = data.draw(cases_of("gpipe"))
    for actor in case.plan.actors:
        back = set()
        for action in actor.actions:
            back |= {action.stage_id} if action.kind == "backward" else set()
            assert action.kind != "forward" or action.stage_id not in back


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_chunks_fill_and_drain_in_a_share_of_the_time(chunks: int) -> None:
    """With as many microbatches as ranks or more, the bubble is that of one chunk on each rank."""
    graph = _pipeline(4, chunks)
    costs = Costs.even(graph)
    plan = generate(graph, 6, GPipe(), costs)
    check(plan, graph)
    emulate(plan, graph)
    assert simulate(plan, graph, costs).bubble == 3 * (1 + 2)


def test_a_frozen_encoder_has_no_backward() -> None:
    """Its forwards alone are in the plan, and evaluation has no others."""
    graph = ModuleGraph(
        modules=(Module(grid=Grid(name="v", ranks=(2,)), trains=(False,)), *_pipeline(2).modules), arrows=(("v", "l"),)
    )
    plan = generate(graph, 4, GPipe(), Costs.even(graph))
    check(plan, graph)
    assert {action.kind for action in plan.actions_of(2)} == {"forward", "send"}
    plan = generate(graph.without_training(), 9, GPipe(), Costs.even(graph))
    check(plan, graph.without_training(), max_in_flight={StageId("v", 0): 3, StageId("l", 0): 2})


def test_a_step_without_microbatches_is_refused() -> None:
    """There is nothing to plan."""
    with pytest.raises(ConfigError, match=r"microbatches: expected 1 or more in a step, got 0"):
        generate(_pipeline(1), 0, GPipe(), Costs.even(_pipeline(1)))


def test_it_is_registered_as_a_plugin() -> None:
    """The entry point leads to the hook that returns its spec."""
    (entry,) = entry_points(group="mimo.schedules", name="gpipe")
    (spec,) = entry.load().mimo_register_schedules()
    assert (spec.name, spec.config, spec.generate) == ("gpipe", GPipe, generate)
