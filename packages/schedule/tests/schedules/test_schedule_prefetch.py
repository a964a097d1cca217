"""Plans in which a module works on the next step: what they hold, what is refused, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest

from mimo.hooks import ConfigError, PlanError
from mimo.schedule import (
    Action,
    ActorPlan,
    Costs,
    Plan,
    Seconds,
    StageCost,
    check,
    in_flight,
    peak_activations,
    simulate,
)
from mimo.schedule.ahead.plugin import Ahead
from mimo.schedule.ahead.plugin import generate as ahead
from mimo.schedule.schedules.one_forward_one_backward import OneForwardOneBackward
from mimo.schedule.schedules.one_forward_one_backward import generate as one_forward_one_backward
from mimo.schedule.testing import emulate
from mimo.topology import Grid, Module, ModuleGraph, StageId

VISION = StageId("vision", 0)


def graph_of(
    vision: Sequence[int], language: Sequence[int], *, prefetch: bool = True, factor: int = 1, pp: int = 1, tp: int = 1
) -> ModuleGraph:
    """Return a frozen encoder, which is pipelined or has tensor ranks, ahead of a pipeline of single ranks."""
    encoder = Grid(name="vision", ranks=vision, pp=pp, tp=tp)
    decoder = Grid(name="language", ranks=language, pp=len(language))
    return ModuleGraph(
        modules=(
            Module(grid=encoder, trains=(False,) * pp, prefetch=prefetch, batch_factor=factor),
            Module(grid=decoder, trains=(True,) * decoder.pp),
        ),
        arrows=(("vision", "language"),),
    )


GRAPHS = {
    "disjoint": graph_of([0], [1, 2]),
    "same rank": graph_of([0], [0]),
    "same ranks, pipelines": graph_of([0, 1], [0, 1], pp=2),
    "tensor ranks, one of them shared": graph_of([0, 1], [1, 2], tp=2),
    "pipeline beside a pipeline": graph_of([0, 1], [2, 3], pp=2, factor=3),
}


def costs_of(graph: ModuleGraph, *, encoder: int, kept: int = 0) -> Costs:
    """Return costs where a forward of an encoder takes so long, and of the language model 1, 1 and 1."""
    cost = StageCost(
        forward=Seconds(each=1), input_gradient=Seconds(each=1), weight_gradient=Seconds(each=1), activations=kept
    )
    stages = {
        stage: attrs.evolve(cost, forward=Seconds(each=encoder if stage.module == "vision" else 1))
        for stage in graph.stages
    }
    return Costs(stages=stages).trained(graph)


def plan_of(graph: ModuleGraph, microbatches: int = 4) -> Plan:
    """Return the 1F1B plan."""
    return one_forward_one_backward(graph, microbatches, OneForwardOneBackward(), Costs.even(graph))


@pytest.mark.parametrize("layout", GRAPHS)
@pytest.mark.parametrize("name", ["1f1b", "ahead"])
def test_the_next_steps_microbatches_are_encoded_and_this_steps_sent(layout: str, name: str) -> None:
    """Forwards are of 5 to 9 of 5, the rows that leave are those of 0 to 4; plan, simulation and emulator agree."""
    graph = GRAPHS[layout]
    plan = plan_of(graph, 5) if name == "1f1b" else ahead(graph, 5, Ahead(), costs_of(graph, encoder=2))
    check(plan, graph)
    emulate(plan, graph)
    simulate(plan, graph, costs_of(graph, encoder=2))
    for actor in plan.actors:
        for stage in (stage for stage in graph.stages if stage.module == "vision"):
            own = [action for action in actor.actions if action.stage_id == stage]
            encoded = [one for action in own if action.kind == "forward" for one in action.microbatches]
            sent = [one for action in own if action.edge == "vision->language" for one in action.microbatches]
            assert encoded in ([], [5, 6, 7, 8, 9])
            assert sent in ([], [0, 1, 2, 3, 4])


def test_the_plan_of_an_encoder_beside_the_language_model() -> None:
    """It hands over one microbatch more than is being used, then encodes its like of the next step."""
    (encoder, _) = plan_of(graph_of([0], [1]), 3).actors
    assert [(action.kind, action.microbatches) for action in encoder.actions] == [
        ("send", (0,)),
        ("send", (1,)),
        ("forward", (3,)),
        ("forward", (4,)),
        ("send", (2,)),
        ("forward", (5,)),
    ]


@pytest.mark.parametrize("layout", GRAPHS)
def test_each_half_finishes_alone(layout: str) -> None:
    """As before the first step and in the last: together they are the whole list, in its order."""
    graph, plan = GRAPHS[layout], plan_of(GRAPHS[layout])
    phases = plan.phase("next"), plan.phase("this")
    for actor, following, this in zip(plan.actors, phases[0].actors, phases[1].actors, strict=True):
        assert all(min(action.microbatches) >= 4 for action in following.actions)
        assert all(max(action.microbatches, default=0) < 4 for action in this.actions)
        assert sorted(map(repr, actor.actions)) == sorted(map(repr, (*following.actions, *this.actions)))
    for phase in phases:
        simulate(phase, graph, Costs.even(graph))
    assert plan.phase("both") is plan


@pytest.mark.parametrize(
    ("layout", "encoder"),
    [("disjoint", 1), ("disjoint", 3), ("pipeline beside a pipeline", 1), ("pipeline beside a pipeline", 2)],
)
def test_an_encoder_on_ranks_of_its_own_costs_the_step_nothing(layout: str, encoder: int) -> None:
    """As long as it has no more work than the language model, steps are as long as those of the latter alone."""
    graph = GRAPHS[layout]
    alone = ModuleGraph(modules=graph.modules[1:], arrows=())
    seconds = simulate(plan_of(alone, 8), alone, costs_of(alone, encoder=0)).seconds
    vision = attrs.evolve(graph.modules[0], batch_factor=1)
    graph = attrs.evolve(graph, modules=(vision, *graph.modules[1:]))
    assert simulate(plan_of(graph, 8), graph, costs_of(graph, encoder=encoder)).seconds == seconds
    waiting = attrs.evolve(graph, modules=(attrs.evolve(vision, prefetch=False), *graph.modules[1:]))
    assert simulate(plan_of(waiting, 8), waiting, costs_of(waiting, encoder=encoder)).seconds > seconds


def test_rows_are_kept_from_step_to_step() -> None:
    """Those of this step until they are sent, those of the next one from when they are made."""
    graph = graph_of([0], [1])
    plan, costs = plan_of(graph), costs_of(graph, encoder=1, kept=10)
    assert in_flight(plan)[VISION] == emulate(plan, graph).in_flight[0] == 4
    assert peak_activations(plan, graph, costs)[0].bytes == 40
    result = simulate(plan, graph, costs)
    assert result.peak_total[0] == 40
    assert dict(result.timeline.memory[0][-1][1]) == {"vision": 40}
    encoder, language = plan.actors
    forwards_first = tuple(sorted(encoder.actions, key=lambda action: action.kind != "forward"))
    at_once = attrs.evolve(plan, actors=(attrs.evolve(encoder, actions=forwards_first), language))
    check(at_once, graph)
    assert peak_activations(at_once, graph, costs)[0].bytes == 80
    with pytest.raises(PlanError, match=r"forward of vision.0: expected at most 7 microbatches in flight, got 8"):
        check(at_once, graph, max_in_flight={VISION: 7})


def test_ahead_counts_rows_for_the_next_step_within_its_budget() -> None:
    """A rank keeps both steps' rows beside what a microbatch of the language model needs."""
    graph = graph_of([0], [0])
    costs = costs_of(graph, encoder=1, kept=10)
    with pytest.raises(ConfigError, match=r"schedule.budget: expected 90 bytes or more"):
        ahead(graph, 4, Ahead(budget=89), costs)
    plan = ahead(graph, 4, Ahead(budget=90), costs)
    check(plan, graph, max_bytes={0: 90}, costs=costs)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("this step's", r"expected each microbatch once, from 4 to 7, got microbatch 0"),
        ("sent later", r"expected each microbatch once, from 0 to 3, got microbatch 4"),
        ("left out", r"expected forward of vision.0, microbatch 7, once in the list, got none"),
    ],
)
def test_other_microbatches_are_refused(wrong: str, text: str) -> None:
    """An encoder ahead neither encodes this step's, nor sends the next one's, nor leaves some for that."""
    graph = graph_of([0], [1])
    plan = plan_of(graph)
    encoder, language = plan.actors

    def turned(action: Action) -> Action:
        if wrong == "this step's" and action.kind == "forward":
            return attrs.evolve(action, microbatches=(action.microbatches[0] - 4,))
        if wrong == "sent later" and action.kind == "send":
            return attrs.evolve(action, microbatches=(action.microbatches[0] + 4,))
        return action

    actions = tuple(turned(action) for action in encoder.actions)[: -1 if wrong == "left out" else None]
    with pytest.raises(PlanError, match=text):
        check(attrs.evolve(plan, actors=(ActorPlan(ranks=(0,), actions=actions), language)), graph)


def test_a_module_ahead_may_feed_another_one_ahead() -> None:
    """What both make is the next step's; what the third gets is this one's."""
    grids = [Grid(name=name, ranks=[rank]) for rank, name in enumerate(("sound", "vision", "language"))]
    graph = ModuleGraph(
        modules=(
            *(Module(grid=grid, trains=(False,), prefetch=True) for grid in grids[:2]),
            Module(grid=grids[2], trains=(True,)),
        ),
        arrows=(("sound", "vision"), ("sound", "language"), ("vision", "language")),
    )
    plan = plan_of(graph, 2)
    check(plan, graph)
    emulate(plan, graph)
    sent = {
        edge: [action.microbatches for action in plan.actors[0].actions if action.edge == edge]
        for edge in ("sound->vision", "sound->language")
    }
    assert sent == {"sound->vision": [(2,), (3,)], "sound->language": [(0,), (1,)]}
