"""What computations must be before they are joined into a plan."""

from __future__ import annotations

import pytest

from mimo.hooks import PlanError
from mimo.schedule import ActionKind, Timed, assemble, check
from mimo.topology import Grid, Module, ModuleGraph, StageId


@pytest.mark.parametrize("finish", [1, 0, float("nan")])
def test_a_computation_that_takes_no_time_is_refused(finish: float) -> None:
    """What it makes would leave before it begins: at one moment messages come first."""
    graph = ModuleGraph(
        modules=tuple(Module(grid=Grid(name=name, ranks=(rank,)), trains=(False,)) for rank, name in enumerate("vl")),
        arrows=(("v", "l"),),
    )

    def timed(module: str, start: float, finish: float) -> Timed:
        return Timed(kind="forward", stage=StageId(module, 0), microbatches=(0,), start=start, finish=finish)

    after = timed("l", 2, 3)
    check(assemble("by hand", graph, 1, [timed("v", 1, 1 + 1e-9), after]), graph)
    with pytest.raises(
        PlanError,
        match=rf"^computations, forward of v\.0, microbatch 0: expected a finish after its start, got start 1, "
        rf"finish {finish}\.$",
    ):
        assemble("by hand", graph, 1, [timed("v", 1, finish), after])


def test_a_reduction_comes_behind_what_its_ranks_compute() -> None:
    """The lane that is done first would wait for the other in the middle of another module's forward."""
    graph = ModuleGraph(
        modules=(
            Module(grid=Grid(name="v", ranks=(0, 1), dp=2), trains=(True,)),
            Module(grid=Grid(name="l", ranks=(1,)), trains=(True,)),
        ),
        arrows=(),
    )

    def timed(kind: ActionKind, module: str, actor: int, start: float, finish: float) -> Timed:
        stage = StageId(module, 0)
        return Timed(kind=kind, stage=stage, microbatches=(0,), start=start, finish=finish, actors=(actor,))

    placed = [
        *(timed("forward", "v", actor, 0, 1) for actor in (0, 1)),
        *(timed("backward", "v", actor, 1, finish) for actor, finish in ((0, 4), (1, 2))),
        timed("forward", "l", 1, 2, 5),
        timed("backward", "l", 1, 5, 6),
    ]
    plan = assemble("by hand", graph, 1, placed)
    check(plan, graph)
    assert [(action.kind, action.module) for action in plan.actions_of(1)] == [
        ("forward", "v"),
        ("backward", "v"),
        ("forward", "l"),
        ("reduce", "v"),
        ("backward", "l"),
        ("reduce", "l"),
    ]
