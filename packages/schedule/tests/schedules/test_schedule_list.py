"""The list schedule: shared ranks, groups that meet, times and latency, and how far ahead."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mimo.schedule import ActionKind, Costs, Timed, assemble, check, in_flight, simulate, stages_to_sink
from mimo.schedule.schedules.list_schedule import ListRules, PipelineRank, list_schedule
from mimo.schedule.schedules.list_state import Pass
from mimo.schedule.schedules.named import rules_of, soonest_free
from mimo.schedule.schedules.one_forward_one_backward import OneForwardOneBackward, generate
from mimo.topology import Grid, Module, ModuleGraph, StageId


def _module(
    name: str,
    ranks: Sequence[int],
    *,
    pp: int = 1,
    tp: int = 1,
    chunks: int = 1,
    trains: bool = True,
    batch_factor: int = 1,
) -> Module:
    grid = Grid(name=name, ranks=ranks, pp=pp, tp=tp, dp=len(ranks) // (pp * tp))
    return Module(grid=grid, trains=(trains,) * pp * chunks, chunks=chunks, batch_factor=batch_factor)


def _graph(*modules: Module) -> ModuleGraph:
    """Return the graph of encoders and a language model, which comes last."""
    *encoders, language = modules
    return ModuleGraph(modules=modules, arrows=tuple((encoder.name, language.name) for encoder in encoders))


def _placed(graph: ModuleGraph, microbatches: int, rules: ListRules | None = None) -> list[Timed]:
    """Return the computations, which a plan can be made of."""
    placed = list_schedule(graph, microbatches, rules or rules_of(graph, microbatches))
    check(assemble("list", graph, microbatches, placed), graph)
    return placed


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_an_encoder_spread_over_a_pipeline_works_in_each_ranks_own_time(pp: int) -> None:
    """Ranks that share it by lanes need not do it at once, so the step takes little more than the work of a rank."""
    graph = _graph(_module("v", range(pp)), _module("l", range(pp), pp=pp))
    costs = Costs.even(graph)
    plan = generate(graph, 32, OneForwardOneBackward(), costs)
    assert 32 * 6 <= simulate(plan, graph, costs).seconds <= 32 * 6 + 7 * pp


def test_ranks_that_meet_do_so_at_once() -> None:
    """A tensor group over two pipeline ranks computes at one time; who is free first waits rather than begin else."""
    graph = _graph(_module("v", range(4), tp=4), _module("l", range(4), pp=2, tp=2))
    placed = _placed(graph, 8)
    assert {timed.actors for timed in placed if timed.stage.module == "v"} == {(0, 1)}
    assert max(timed.finish for timed in placed) <= 8 * 6 + 8 * 3
    lanes = _graph(_module("v", range(4), tp=2), _module("l", range(4), pp=2, tp=2))
    assert {timed.actors for timed in _placed(lanes, 8) if timed.stage.module == "v"} == {(0,), (1,)}


@pytest.mark.parametrize("each", [1, 2, 3])
def test_a_stage_is_ahead_of_its_consumers_and_a_pass_more(each: int) -> None:
    """Passes of several microbatches round that up; with one it is the length of the longest path."""
    graph = _graph(_module("v", (0, 1), pp=2, batch_factor=each), _module("l", (2, 3, 4), pp=3))
    bounds = rules_of(graph, 12).bounds
    assert (
        bounds
        == {
            1: stages_to_sink(graph),
            2: {
                StageId("l", 2): 1,
                StageId("l", 1): 2,
                StageId("l", 0): 3,
                StageId("v", 1): 6,
                StageId("v", 0): 8,
            },
            3: {
                StageId("l", 2): 1,
                StageId("l", 1): 2,
                StageId("l", 0): 3,
                StageId("v", 1): 9,
                StageId("v", 0): 12,
            },
        }[each]
    )
    plan = generate(graph, 12, OneForwardOneBackward(), Costs.even(graph))
    check(plan, graph, max_in_flight=bounds)
    assert in_flight(plan)[StageId("v", 1)] == bounds[StageId("v", 1)]


def test_a_consumer_of_larger_passes_is_fed() -> None:
    """Its first pass needs more microbatches than a source with passes of one would begin by its distance alone."""
    graph = _graph(_module("v", (0,)), _module("l", (1,), batch_factor=5))
    placed = _placed(graph, 7)
    assert [timed.microbatches for timed in placed if timed.stage.module == "l" and timed.kind == "forward"] == [
        (0, 1, 2, 3, 4),
        (5, 6),
    ]


def test_a_fixed_order_is_kept() -> None:
    """A line does its passes in the order that it is given, and nothing in between."""
    graph = _graph(_module("l", (0, 1), pp=2))
    kinds: Sequence[ActionKind] = (
        "forward",
        "forward",
        "input-gradient",
        "input-gradient",
        "weight-gradient",
        "weight-gradient",
    )
    order = [Pass(kind, StageId("l", 1), (at % 2,)) for at, kind in enumerate(kinds)]
    rules = ListRules(priority=soonest_free(graph), orders={PipelineRank("l", 1): order}, bounds={StageId("l", 0): 2})
    placed = _placed(graph, 2, rules)
    assert [Pass(timed.kind, timed.stage, timed.microbatches) for timed in placed if timed.stage.stage == 1] == order


def test_a_way_that_is_blocked_is_an_assertion() -> None:
    """A bound that lets nothing begin is a fault of ours, and no plan is made."""
    graph = _graph(_module("l", (0,), batch_factor=2))
    with pytest.raises(AssertionError, match="StageId"):
        list_schedule(graph, 4, ListRules(priority=soonest_free(graph), bounds={StageId("l", 0): 1}))


def test_times_and_latency_are_those_of_the_rules() -> None:
    """A consumer begins when the rows are there, and the source goes back when the gradient is."""
    graph = _graph(_module("v", (0,)), _module("l", (1,)))
    rules = ListRules(
        priority=soonest_free(graph),
        seconds=lambda one: 10 if one.stage.module == "v" else 1,
        latency=lambda edge: {"v->l": 3}[edge],
    )
    placed = {(timed.stage.module, timed.kind): (timed.start, timed.finish) for timed in _placed(graph, 1, rules)}
    assert placed == {
        ("v", "forward"): (0, 10),
        ("l", "forward"): (13, 14),
        ("l", "backward"): (14, 15),
        ("v", "backward"): (18, 28),
    }
