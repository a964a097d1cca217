"""The 1F1B generator on graphs that one can draw: the textbook pipeline, frozen parts, fan-out, shared ranks."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points

import pytest

from mimo.hooks import ConfigError
from mimo.schedule import Costs, Plan, ScheduleSpec, check, in_flight, stages_to_sink
from mimo.schedule.plan.texts import action_text
from mimo.schedule.schedules.one_forward_one_backward import OneForwardOneBackward, generate
from mimo.schedule.testing import emulate
from mimo.topology import Grid, Module, ModuleGraph, StageId


def _module(
    name: str,
    ranks: Sequence[int],
    *,
    trains: bool | tuple[bool, ...] = True,
    tied: bool = False,
    pp: int = 1,
    dp: int = 1,
    tp: int = 1,
) -> Module:
    flags = trains if isinstance(trains, tuple) else (trains,) * pp
    return Module(grid=Grid(name=name, ranks=ranks, pp=pp, dp=dp, tp=tp), trains=flags, tied=tied)


def _plan(graph: ModuleGraph, microbatches: int) -> Plan:
    """Return the plan, proved and emulated."""
    plan = generate(graph, microbatches, OneForwardOneBackward(), Costs.even(graph))
    check(plan, graph, max_in_flight=stages_to_sink(graph))
    emulate(plan, graph)
    return plan


def _texts(plan: Plan, rank: int) -> list[str]:
    return [action_text(action) for action in plan.actions_of(rank)]


def _textbook(stages: int, stage: int, microbatches: int) -> list[tuple[str, int]]:
    """Return a stage's computations by the closed form: warm up, then one forward one backward, then drain."""
    warm = min(stages - 1 - stage, microbatches)
    order = [("forward", microbatch) for microbatch in range(warm)]
    for microbatch in range(warm, microbatches):
        order += [("forward", microbatch), ("backward", microbatch - warm)]
    return order + [("backward", microbatch) for microbatch in range(microbatches - warm, microbatches)]


@pytest.mark.parametrize("stages", range(1, 7))
@pytest.mark.parametrize("microbatches", range(1, 13))
def test_a_plain_pipeline_is_the_textbook_one(stages: int, microbatches: int) -> None:
    """Every stage computes in the order that the closed form of 1F1B gives it, and keeps no more than that needs."""
    graph = ModuleGraph(modules=(_module("l", range(stages), pp=stages),), arrows=())
    plan = _plan(graph, microbatches)
    for stage in range(stages):
        order = [
            (action.kind, action.microbatches[0])
            for action in plan.actions_of(stage)
            if action.kind in ("forward", "backward")
        ]
        assert order == _textbook(stages, stage, microbatches)
        assert in_flight(plan)[StageId("l", stage)] == min(stages - stage, microbatches)


def test_two_stages_in_full() -> None:
    """Receives are posted one computation early, messages follow what makes them, and reductions close the step."""
    plan = _plan(ModuleGraph(modules=(_module("l", (0, 1), pp=2),), arrows=()), 3)
    assert _texts(plan, 1) == [
        "receive on l.0-1 by l.1, microbatch 0",
        "receive on l.0-1 by l.1, microbatch 1",
        "forward of l.1, microbatch 0",
        "backward of l.1, microbatch 0",
        "send on l.0-1 by l.1, microbatch 0",
        "forward of l.1, microbatch 1",
        "receive on l.0-1 by l.1, microbatch 2",
        "backward of l.1, microbatch 1",
        "send on l.0-1 by l.1, microbatch 1",
        "forward of l.1, microbatch 2",
        "backward of l.1, microbatch 2",
        "send on l.0-1 by l.1, microbatch 2",
        "reduce of l.1",
    ]


def test_no_gradient_goes_into_a_frozen_encoder() -> None:
    """A frozen encoder computes and sends, and hears nothing back; it runs ahead no further than the path is long."""
    graph = ModuleGraph(modules=(_module("v", (0,), trains=False), _module("l", (1,))), arrows=(("v", "l"),))
    plan = _plan(graph, 3)
    assert {action.kind for action in plan.actions_of(0)} == {"forward", "send"}
    assert [text for text in _texts(plan, 1) if text.startswith(("send", "reduce"))] == ["reduce of l.0"]


def test_a_frozen_language_model_carries_gradient_to_a_trained_projector() -> None:
    """It runs every backward and sends the gradients on, but has nothing to reduce."""
    graph = ModuleGraph(
        modules=(_module("v", (0, 1), pp=2, trains=(False, True)), _module("l", (2, 3), pp=2, trains=False)),
        arrows=(("v", "l"),),
    )
    plan = _plan(graph, 2)
    kinds = [{action.kind for action in plan.actions_of(rank)} for rank in range(4)]
    assert kinds[0] == {"forward", "send"}
    assert kinds[1] == {"forward", "backward", "send", "receive", "reduce"}
    assert kinds[2] == {"forward", "backward", "send", "receive"}
    assert kinds[3] == {"forward", "backward", "send", "receive"}
    assert "send on v.0-1 by v.1, microbatch 0" not in _texts(plan, 1)


def test_a_trained_language_model_behind_a_frozen_front_reduces_what_trains_alone() -> None:
    """Of a half frozen pipeline the first stage runs no backward and the second reduces."""
    graph = ModuleGraph(modules=(_module("l", (0, 1), pp=2, trains=(False, True)),), arrows=())
    plan = _plan(graph, 2)
    assert "backward of l.0, microbatch 0" not in _texts(plan, 0)
    assert _texts(plan, 1)[-1] == "reduce of l.1"


def test_a_stage_that_feeds_two_waits_for_both_gradients() -> None:
    """With two sinks, the source's backward stands behind the gradients of both, and evaluates each microbatch once."""
    graph = ModuleGraph(
        modules=(_module("a", (0,)), _module("b", (1,)), _module("c", (2,))), arrows=(("a", "b"), ("a", "c"))
    )
    texts = _texts(_plan(graph, 2), 0)
    backward = texts.index("backward of a.0, microbatch 0")
    for edge in ("a->b", "a->c"):
        assert texts.index(f"receive on {edge} by a.0, microbatch 0") < backward


def test_modules_on_one_rank_finish_a_microbatch_before_the_next() -> None:
    """On one rank, what frees memory comes first, and messages to oneself are posted before they are sent."""
    graph = ModuleGraph(modules=(_module("v", (0,)), _module("l", (0,))), arrows=(("v", "l"),))
    computations = [text for text in _texts(_plan(graph, 2), 0) if text.startswith(("forward", "backward"))]
    assert computations == [
        f"{kind}, microbatch {microbatch}"
        for microbatch in (0, 1)
        for kind in ("forward of v.0", "forward of l.0", "backward of l.0", "backward of v.0")
    ]


def test_a_stage_over_several_actors_is_listed_by_each() -> None:
    """On overlapping ranks the shared ones list both modules, and the others theirs alone."""
    graph = ModuleGraph(modules=(_module("v", (0, 1), dp=2), _module("l", (1, 2), tp=2)), arrows=(("v", "l"),))
    plan = _plan(graph, 4)
    assert [actor.ranks for actor in plan.actors] == [(0,), (1,), (2,)]
    modules = [{action.module for action in actor.actions} for actor in plan.actors]
    assert modules == [{"v"}, {"v", "l"}, {"l"}]


def test_independent_encoders_work_side_by_side() -> None:
    """Two encoders before the language model each keep as many microbatches as their own path is long."""
    graph = ModuleGraph(
        modules=(_module("v", (0, 1), pp=2), _module("a", (2,)), _module("l", (3,))), arrows=(("v", "l"), ("a", "l"))
    )
    plan = _plan(graph, 8)
    assert {str(stage.module) + str(stage.stage): count for stage, count in in_flight(plan).items()} == {
        "v0": 3,
        "v1": 2,
        "a0": 2,
        "l0": 1,
    }


def test_a_tied_parameter_is_added_up_before_its_stage_is_reduced() -> None:
    """Both copies meet after the last backward of either; where it does not train or stands once, nothing is done."""
    tied = _plan(ModuleGraph(modules=(_module("l", (0, 1, 2), pp=3, tied=True),), arrows=()), 2)
    assert _texts(tied, 0)[-2:] == ["reduce on l.tied by l.0", "reduce of l.0"]
    assert _texts(tied, 1)[-1] == "reduce of l.1"
    assert _texts(tied, 2)[-2:] == ["reduce on l.tied by l.2", "reduce of l.2"]
    for module in (
        _module("l", (0,), tied=True),
        _module("l", (0, 1), pp=2, tied=True, trains=(False, True)),
        _module("l", (0, 1), pp=2, tied=True, trains=False),
    ):
        plan = _plan(ModuleGraph(modules=(module,), arrows=()), 2)
        assert not any("tied" in text for rank in module.grid.ranks for text in _texts(plan, rank))


def test_a_step_without_microbatches_is_refused() -> None:
    """There is nothing to plan."""
    graph = ModuleGraph(modules=(_module("l", (0,)),), arrows=())
    with pytest.raises(ConfigError, match=r"microbatches: expected 1 or more in a step, got 0"):
        generate(graph, 0, OneForwardOneBackward(), Costs.even(graph))


def test_it_is_registered_as_a_plugin() -> None:
    """The entry point leads to the hook that returns its spec."""
    (entry,) = entry_points(group="mimo.schedules", name="1f1b")
    (spec,) = entry.load().mimo_register_schedules()
    assert spec == ScheduleSpec(name="1f1b", config=OneForwardOneBackward, generate=generate, uses_costs=False)


def test_a_thousand_ranks_are_planned_and_proved() -> None:
    """64 microbatches over 1,024 ranks in 32 stages, with an encoder on all of them."""
    graph = ModuleGraph(
        modules=(_module("v", range(1024), dp=1024), _module("l", range(1024), pp=32, tp=8, dp=4)), arrows=(("v", "l"),)
    )
    plan = generate(graph, 64, OneForwardOneBackward(), Costs.even(graph))
    check(plan, graph, max_in_flight=stages_to_sink(graph))
    assert [len(actor.ranks) for actor in plan.actors] == [32] * 32
