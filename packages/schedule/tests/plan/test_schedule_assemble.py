"""What computations must be before they are joined into a plan."""

from __future__ import annotations

import pytest

from mimo.hooks import PlanError
from mimo.schedule import Timed, assemble, check
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
