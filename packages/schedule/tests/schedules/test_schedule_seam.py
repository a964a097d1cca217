"""Plans in which a tower works on the next step and its projector on this one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest

from mimo.hooks import PlanError
from mimo.schedule import Action, ActorPlan, Costs, Plan, Seconds, StageCost, check, in_flight, simulate
from mimo.schedule.ahead import plugin as ahead
from mimo.schedule.schedules import gpipe, interleaved, one_forward_one_backward, zero_bubble
from mimo.schedule.testing import emulate
from mimo.topology import Grid, Module, ModuleGraph, StageId

TOWER, PROJECTOR = StageId("vision", 0), StageId("vision.projector", 0)


def graph_of(
    vision: Sequence[int],
    language: Sequence[int],
    *,
    seam: bool = True,
    factor: int = 1,
    pp: int = 1,
    tp: int = 1,
    chunks: int = 1,
    placement: Any = "loop",
) -> ModuleGraph:
    """Return an encoder whose projector trains, divided where it has a seam, ahead of a pipeline of single ranks."""
    encoder = Grid(name="vision", ranks=vision, pp=pp, tp=tp)
    decoder = Grid(name="language", ranks=language, pp=len(language))
    trains = (False,) * pp + (True,) if seam else (False,) * (pp - 1) + (True,)
    graph = ModuleGraph(
        modules=(
            Module(grid=encoder, trains=trains, batch_factor=factor, seam=seam, placement=placement),
            Module(grid=decoder, trains=(True,) * decoder.pp * chunks, chunks=chunks, placement=placement),
        ),
        arrows=(("vision", "language"),),
    )
    return graph.divided()


LAYOUTS: dict[str, dict[str, Any]] = {
    "disjoint": {"vision": [0], "language": [1, 2]},
    "same ranks": {"vision": [0, 1], "language": [0, 1]},
    "same ranks, pipelines": {"vision": [0, 1], "language": [0, 1], "pp": 2},
    "tensor ranks, one of them shared": {"vision": [0, 1], "language": [1, 2], "tp": 2},
    "pipeline beside a pipeline": {"vision": [0, 1], "language": [2, 3], "pp": 2, "factor": 3},
}
LAYOUTS["same ranks"]["tp"] = 2
SCHEDULES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "1f1b": (one_forward_one_backward, None, {}),
    "gpipe": (gpipe, None, {}),
    "interleaved": (interleaved, None, {"chunks": 2}),
    "zero-bubble h1": (zero_bubble, "h1", {}),
    "zero-bubble h2": (zero_bubble, "h2", {}),
    "zero-bubble v": (zero_bubble, "v", {"chunks": 2, "placement": "v"}),
    "ahead": (ahead, None, {}),
}


def costs_of(graph: ModuleGraph, *, tower: float = 2) -> Costs:
    """Return costs where a tower's forward takes so long, a projector's a tenth, and all else 1, 1 and 1."""
    cost = StageCost(forward=Seconds(each=1), input_gradient=Seconds(each=1), weight_gradient=Seconds(each=1))
    seconds = {"vision": tower, "vision.projector": 0.1, "language": 1}
    stages = {
        stage: attrs.evolve(cost, forward=Seconds(each=seconds[stage.module]), activations=10) for stage in graph.stages
    }
    if PROJECTOR in stages:
        tenth = Seconds(each=0.1)
        stages[PROJECTOR] = attrs.evolve(stages[PROJECTOR], input_gradient=tenth, weight_gradient=tenth)
    return Costs(stages=stages).trained(graph)


def plan_of(graph: ModuleGraph, microbatches: int = 4, schedule: str = "1f1b") -> Plan:
    """Return the plan of a schedule by its name."""
    module, form, _ = SCHEDULES[schedule]
    (spec,) = module.mimo_register_schedules()
    config = spec.config() if form is None else spec.config(form=form)
    plan: Plan = spec.generate(graph, microbatches, config, costs_of(graph))
    return plan


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_tower_is_a_step_ahead_of_its_projector(layout: str, schedule: str) -> None:
    """By every schedule: towers encode 6 to 11 of 6, projectors take 0 to 5; plan, emulator and simulator agree."""
    graph = graph_of(**LAYOUTS[layout], **SCHEDULES[schedule][2])
    plan = plan_of(graph, 6, schedule)
    check(plan, graph)
    emulate(plan, graph)
    simulate(plan, graph, costs_of(graph))
    done: dict[tuple[StageId, str], set[int]] = {}
    for actor in plan.actors:
        for action in actor.actions:
            done.setdefault((action.stage_id, action.kind), set()).update(action.microbatches)
    last = StageId("vision", graph.by_name["vision"].stages - 1)
    assert done[last, "forward"] == set(range(6, 12))
    assert done[last, "send"] == done[PROJECTOR, "receive"] == set(range(6))
    assert done[PROJECTOR, "forward"] == set(range(6))
    assert (PROJECTOR, "reduce") in done
    assert not any(kind in ("backward", "input-gradient", "reduce") for stage, kind in done if stage == last)
    for phase in ("next", "this"):
        simulate(plan.phase(phase), graph, costs_of(graph))


def test_the_plan_of_a_tower_beside_the_language_model() -> None:
    """The rank hands its projector the rows of the step before, trains it, and encodes for the next step meanwhile."""
    (encoder, _) = plan_of(graph_of([0], [1]), 2).actors
    words = [(action.kind, action.stage_id, action.microbatches) for action in encoder.actions if not action.edge]
    assert [word for word in words if word[1] == TOWER] == [("forward", TOWER, (2,)), ("forward", TOWER, (3,))]
    assert [word for word in words if word[1] == PROJECTOR] == [
        ("forward", PROJECTOR, (0,)),
        ("forward", PROJECTOR, (1,)),
        ("backward", PROJECTOR, (0,)),
        ("backward", PROJECTOR, (1,)),
        ("reduce", PROJECTOR, ()),
    ]
    assert words.index(("forward", PROJECTOR, (0,))) < words.index(("forward", TOWER, (2,)))


@pytest.mark.parametrize("tower", [0.5, 0.8])
def test_a_tower_on_ranks_of_its_own_costs_less_than_in_its_step(tower: float) -> None:
    """Only the projector is waited for: one pass of it is all that a step is longer than without an encoder."""
    graph, whole = graph_of([0], [1, 2]), graph_of([0], [1, 2], seam=False)
    alone = ModuleGraph(modules=graph.modules[2:], arrows=())
    ahead_of_it = simulate(plan_of(graph, 8), graph, costs_of(graph, tower=tower)).seconds
    in_its_step = simulate(plan_of(whole, 8), whole, costs_of(whole, tower=tower + 0.1)).seconds
    assert ahead_of_it < in_its_step
    least = simulate(plan_of(alone, 8), alone, costs_of(alone)).seconds
    assert ahead_of_it == pytest.approx(least + 0.3)  # a forward before the step's first, a backward after its last


def test_rows_at_the_seam_are_kept_from_step_to_step() -> None:
    """A tower's rows are in flight until its projector has been sent them, in the step after."""
    graph = graph_of([0], [1])
    plan = plan_of(graph, 4)
    found = emulate(plan, graph).in_flight[0]
    assert in_flight(plan)[TOWER] >= 4
    assert found >= 4 + in_flight(plan)[PROJECTOR] - 1
    peak = simulate(plan, graph, costs_of(graph)).timeline.memory[0][-1][1]
    assert dict(peak) == {"vision": 40, "vision.projector": 0} or dict(peak) == {"vision": 40}


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("the tower's own step", r"expected each microbatch once, from 4 to 7, got microbatch 0"),
        ("the projector's next step", r"expected each microbatch once, from 0 to 3, got microbatch 4"),
        ("before its rows", r"forward of vision.projector.0, microbatch 0"),
    ],
)
def test_the_checker_refuses_a_side_that_works_on_the_other_ones_step(wrong: str, text: str) -> None:
    """Neither does a tower this step's work nor a projector the next one's, nor before it was handed the rows."""
    graph = graph_of([0], [1])
    plan = plan_of(graph)
    encoder, language = plan.actors

    def turned(action: Action) -> Action:
        if wrong == "the tower's own step" and (action.kind, action.stage_id) == ("forward", TOWER):
            return attrs.evolve(action, microbatches=(action.microbatches[0] - 4,))
        if wrong == "the projector's next step" and (action.kind, action.stage_id) == ("forward", PROJECTOR):
            return attrs.evolve(action, microbatches=(action.microbatches[0] + 4,))
        return action

    actions = [turned(action) for action in encoder.actions]
    if wrong == "before its rows":
        first = next(
            at for at, action in enumerate(actions) if action.stage_id == PROJECTOR and action.kind == "forward"
        )
        actions.insert(0, actions.pop(first))
    with pytest.raises(PlanError, match=text):
        check(attrs.evolve(plan, actors=(ActorPlan(ranks=(0,), actions=tuple(actions)), language)), graph)


def test_evaluation_has_both_sides_in_their_own_step() -> None:
    """The plan of a graph in which nothing trains has no word of the next step."""
    graph = graph_of([0], [1]).without_training()
    plan = plan_of(graph)
    check(plan, graph)
    emulate(plan, graph)
    assert not any(plan.is_ahead(action) for actor in plan.actors for action in actor.actions)
