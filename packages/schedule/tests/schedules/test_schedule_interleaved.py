"""Interleaved plans on graphs that one can draw: Megatron's order, its bubble, encoders ahead of it, and refusals."""

from __future__ import annotations

from fractions import Fraction
from importlib.metadata import entry_points
from typing import Any

import pytest

from mimo.hooks import ConfigError
from mimo.schedule import Costs, Plan, check, in_flight, simulate
from mimo.schedule.schedules.interleaved import Interleaved, generate
from mimo.schedule.testing import emulate
from mimo.topology import Grid, Module, ModuleGraph, StageId


def _module(
    name: str, first: int, pp: int, *, chunks: int = 1, trains: tuple[bool, ...] | None = None, batch_factor: int = 1
) -> Module:
    return Module(
        grid=Grid(name=name, ranks=range(first, first + pp), pp=pp),
        trains=(True,) * pp * chunks if trains is None else trains,
        chunks=chunks,
        batch_factor=batch_factor,
    )


def _pipeline(ranks: int, chunks: int) -> ModuleGraph:
    return ModuleGraph(modules=(_module("l", 0, ranks, chunks=chunks),), arrows=())


def _plan(graph: ModuleGraph, microbatches: int) -> Plan:
    """Return the plan, proved and emulated."""
    plan = generate(graph, microbatches, Interleaved(), Costs.even(graph))
    check(plan, graph)
    emulate(plan, graph)
    return plan


def _order(plan: Plan, rank: int) -> str:
    """Return the computations of a rank in brief: kind, stage, microbatch."""
    return " ".join(
        f"{action.kind[0].upper()}{action.stage}.{action.microbatches[0]}"
        for action in plan.actions_of(rank)
        if action.kind in ("forward", "backward")
    )


def test_the_order() -> None:
    """Ranks take microbatches through their chunks in groups of as many as there are ranks."""
    plan = _plan(_pipeline(2, 2), 4)
    assert _order(plan, 0) == ("F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3")
    assert _order(plan, 1) == ("F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("chunks", [2, 3])
def test_the_bubble_is_a_share_of_that_of_1f1b(ranks: int, chunks: int) -> None:
    """Of one V-th, for V chunks, whatever forward and backward take."""
    graph = _pipeline(ranks, chunks)
    times = {"forward": 2, "input_gradient": 5, "weight_gradient": 4}
    exact: Any = {kind: Fraction(each, chunks) for kind, each in times.items()}
    costs = Costs.even(graph, **exact)
    for microbatches in (ranks, 3 * ranks):
        assert simulate(_plan(graph, microbatches), graph, costs).bubble == Fraction((ranks - 1) * 11, chunks)


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 2), (4, 2), (4, 3), (3, 4)])
def test_memory_is_that_of_megatrons_order(ranks: int, chunks: int) -> None:
    """The first rank keeps as many passes as it warms up by, each of a V-th of its layers."""
    plan = _plan(_pipeline(ranks, chunks), 4 * ranks)
    passes = most = 0
    for action in plan.actions_of(0):
        passes += {"forward": 1, "backward": -1}.get(action.kind, 0)
        most = max(most, passes)
    assert most == (chunks - 1) * ranks + 2 * ranks - 1


def test_encoders_are_ahead_by_what_the_first_chunk_keeps() -> None:
    """One of one stage, which has no order of its own, and one in chunks, which has."""
    graph = ModuleGraph(
        modules=(_module("v", 4, 1), _module("a", 5, 2, chunks=2), _module("l", 0, 4, chunks=2)),
        arrows=(("v", "l"), ("a", "l")),
    )
    plan = _plan(graph, 16)
    kept = in_flight(plan)
    assert kept[StageId("v", 0)] == kept[StageId("l", 0)] + 1
    assert kept[StageId("a", 3)] > kept[StageId("l", 0)]
    plain = generate(graph, 16, Interleaved(), Costs.even(graph))
    assert simulate(plain, graph, Costs.even(graph)).seconds < 16 * 4 * 3 * 1.3


def test_a_frozen_chunk_leaves_the_order_of_the_others() -> None:
    """The first stage runs no backward; the rest of its rank's order is as it was."""
    graph = ModuleGraph(modules=(_module("l", 0, 2, chunks=2, trains=(False, True, True, True)),), arrows=())
    order = _order(_plan(graph, 4), 0)
    assert order == "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 F2.3 B2.2 B2.3"


def test_a_number_of_microbatches_that_makes_no_groups_is_refused() -> None:
    """The error says what it must be a multiple of, and the numbers nearby that work for all modules."""
    with pytest.raises(
        ConfigError,
        match=r"^microbatches: expected a multiple of modules\.l\.pp = 4 in a step, got 6\. The smallest that works is "
        r"4, the next from here 8; a step has run\.global_batch / \(run\.micro_batch x lanes\)\.$",
    ):
        _plan(_pipeline(4, 2), 6)
    graph = ModuleGraph(
        modules=(_module("v", 0, 3, chunks=2, batch_factor=2), _module("l", 3, 2, chunks=2)), arrows=(("v", "l"),)
    )
    with pytest.raises(ConfigError, match=r"modules\.v\.pp = 3 passes of 2 microbatches in a step, got 3\. .* is 6;"):
        _plan(graph, 3)
    _plan(graph, 6)


def test_a_model_without_chunks_is_refused() -> None:
    """The error names the longest pipeline, which would gain most."""
    graph = ModuleGraph(modules=(_module("v", 0, 1), _module("l", 1, 2)), arrows=(("v", "l"),))
    with pytest.raises(
        ConfigError,
        match=r"^modules\.l\.chunks: expected 2 or more with schedule\.plugin = 'interleaved'.*, got 1\. "
        r"The smallest that works is 2;",
    ):
        _plan(graph, 4)


def test_evaluation_asks_for_nothing() -> None:
    """Where nothing trains any number of microbatches will do, and no chunks are needed."""
    for chunks in (1, 2):
        graph = _pipeline(4, chunks).without_training()
        assert "B" not in _order(_plan(graph, 3), 0)


def test_it_is_registered_as_a_plugin() -> None:
    """The entry point leads to the hook that returns its spec."""
    (entry,) = entry_points(group="mimo.schedules", name="interleaved")
    (spec,) = entry.load().mimo_register_schedules()
    assert (spec.name, spec.config, spec.generate) == ("interleaved", Interleaved, generate)
