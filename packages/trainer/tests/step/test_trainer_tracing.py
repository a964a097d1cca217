"""Which steps are traced, on what clock, and what a traced step costs."""

from __future__ import annotations

import attrs

from mimo.schedule import Action, ActionKind, Bar, Costs, Seconds, StageCost, Timeline
from mimo.topology import Grid, Module, ModuleGraph, StageId
from mimo.trainer.step import tracing as _tracing
from mimo.trainer.step.tracing import is_traced, mean_costs


def test_traced_steps_are_powers_of_two_and_the_last() -> None:
    """Not the first, unless it is the only one."""
    assert [count for count in range(1, 70) if is_traced(count, last=False)] == [2, 4, 8, 16, 32, 64]
    assert is_traced(1, last=True)
    assert is_traced(7, last=True)


def test_times_of_other_machines_are_moved_to_one_clock() -> None:
    """Those of the machine of rank 0 stay; another's barrier ended when rank 0's did."""
    ranks = [
        [[7.0, 100.0, 0.0], [101.0, 102.0, 103.0]],
        [[7.0, 100.5, 0.0], [101.0, 102.0, 103.0]],
        [[8.0, 5100.0, 0.0], [5101.0, 5102.0, 5104.0]],
    ]
    assert _tracing._on_one_clock(ranks) == [[[101, 102, 103]], [[101, 102, 103]], [[101, 102, 104]]]


def test_machines_are_distinguished_by_their_last_start() -> None:
    """All processes of this machine give the same number."""
    assert _tracing._machine() == _tracing._machine() != 0


def test_a_traced_step_costs_what_its_computations_took() -> None:
    """The mean of each kind, for one microbatch; a reduction what the rank took that came last to it."""
    graph = ModuleGraph(modules=(Module(grid=Grid(name="language", ranks=(0, 1), dp=2), trains=(True,)),), arrows=())

    def bar(rank: int, kind: ActionKind, microbatches: tuple[int, ...], start: float, finish: float) -> Bar:
        action = Action(kind=kind, module="language", stage=0, microbatches=microbatches)
        return Bar(ranks=(rank,), action=action, start=start, finish=finish)

    bars = (
        bar(0, "forward", (0, 1), 0, 4),
        bar(0, "backward", (0,), 4, 9),
        bar(0, "backward", (1,), 9, 16),
        bar(0, "reduce", (), 16, 17),
        bar(1, "forward", (0, 1), 0, 8),
        bar(1, "reduce", (), 14, 17),
    )
    stage = StageId("language", 0)
    formula = Costs(stages={stage: StageCost(forward=Seconds(each=1), recompute=Seconds(each=1), activations=5)})
    costs = mean_costs(Timeline(name="t", ranks=(0, 1), bars=bars), graph, formula)
    assert costs.stages[stage] == StageCost(
        forward=Seconds(each=3),
        input_gradient=Seconds(each=3),
        weight_gradient=Seconds(each=3),
        reduce=1,
        activations=5,
    )
    assert attrs.evolve(costs, stages={}) == attrs.evolve(formula, stages={})
