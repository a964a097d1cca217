"""Simulated bubbles and step times against the closed formulas of the literature: equal, in exact arithmetic.

p stages, n microbatches, V chunks; F forward, B = B_in + W full backward, of one stage. A bubble is the time that the
rank with the longest span from first to last computation spends in it without any.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import attrs
import pytest

from mimo.schedule import Costs, Link, Plan, Simulation, check, simulate
from mimo.schedule.schedules.interleaved import Interleaved
from mimo.schedule.schedules.interleaved import generate as interleaved
from mimo.schedule.schedules.one_forward_one_backward import OneForwardOneBackward
from mimo.schedule.schedules.one_forward_one_backward import generate as one_forward_one_backward
from mimo.schedule.schedules.zero_bubble import Form, ZeroBubble
from mimo.schedule.schedules.zero_bubble import generate as zero_bubble
from mimo.topology import Grid, Module, ModuleGraph, StageId

PIPELINES = range(1, 17)
FORMS: tuple[Form, ...] = ("h1", "h2")
SECONDS = [(1, 1, 1), (3, 2, 5), (Fraction(1, 3), Fraction(2, 7), Fraction(3, 11))]
"""Forward, input gradient and weight gradient."""


def _module(name: str, first: int, pp: int, *, chunks: int = 1, trains: bool = True) -> Module:
    return Module(
        grid=Grid(name=name, ranks=range(first, first + pp), pp=pp), trains=(trains,) * pp * chunks, chunks=chunks
    )


def _pipeline(pp: int, *, chunks: int = 1) -> ModuleGraph:
    return ModuleGraph(modules=(_module("language", 0, pp, chunks=chunks),), arrows=())


def _costs(graph: ModuleGraph, seconds: Any) -> Costs:
    forward, input_gradient, weight_gradient = seconds
    return Costs.even(graph, forward=forward, input_gradient=input_gradient, weight_gradient=weight_gradient)


def _one_forward_one_backward(graph: ModuleGraph, microbatches: int, costs: Costs) -> Plan:
    return one_forward_one_backward(graph, microbatches, OneForwardOneBackward(), costs)


def _some(lowest: int, *others: int) -> Iterator[int]:
    """Yield numbers of microbatches from the lowest up, the lowest included, none over 64."""
    yield from sorted({each for each in (lowest, *others) if lowest <= each <= 64})


def _assert_exact(result: Simulation, *, bubble: Any, work: Any) -> None:
    assert result.bubble == bubble
    assert result.seconds == work + bubble
    assert isinstance(result.bubble, (int, Fraction))
    assert isinstance(result.seconds, (int, Fraction))


@pytest.mark.parametrize("pp", PIPELINES)
@pytest.mark.parametrize("seconds", SECONDS)
def test_1f1b(pp: int, seconds: Any) -> None:
    """Any F and B: the bubble is (p - 1)(F + B), and the step n(F + B) longer, for any number of microbatches."""
    graph = _pipeline(pp)
    costs = _costs(graph, seconds)
    for microbatches in _some(1, pp - 1, pp, 2 * pp + 1):
        result = simulate(_one_forward_one_backward(graph, microbatches, costs), graph, costs)
        _assert_exact(result, bubble=(pp - 1) * sum(seconds), work=microbatches * sum(seconds))


@pytest.mark.parametrize("pipelines", [(1, 2, 1), (2, 3, 4), (1, 5, 2), (3, 1, 3)])
@pytest.mark.parametrize("seconds", SECONDS)
def test_1f1b_of_a_chain_of_modules(pipelines: tuple[int, int, int], seconds: Any) -> None:
    """An encoder, a language model and what that feeds are, on ranks of their own, one pipeline of all their stages."""
    encoder, language, drawer = pipelines
    graph = ModuleGraph(
        modules=(
            _module("language", encoder, language),
            _module("drawer", encoder + language, drawer),
            _module("encoder", 0, encoder),
        ),
        arrows=(("encoder", "language"), ("language", "drawer")),
    )
    costs, stages = _costs(graph, seconds), sum(pipelines)
    for microbatches in _some(1, stages, 2 * stages + 1):
        plan = _one_forward_one_backward(graph, microbatches, costs)
        check(plan, graph)
        result = simulate(plan, graph, costs)
        _assert_exact(result, bubble=(stages - 1) * sum(seconds), work=microbatches * sum(seconds))


@pytest.mark.parametrize(("short", "long"), [(1, 1), (1, 3), (2, 4)])
@pytest.mark.parametrize("seconds", SECONDS)
def test_1f1b_of_two_tails(short: int, long: int, seconds: Any) -> None:
    """Of two modules that a language model feeds, the path through the longer one counts; the other waits for it."""
    graph = ModuleGraph(
        modules=(
            _module("language", 0, 2),
            _module("talker", 2, short),
            _module("drawer", 2 + short, long),
        ),
        arrows=(("language", "talker"), ("language", "drawer")),
    )
    costs, stages = _costs(graph, seconds), 2 + long
    for microbatches in _some(1, stages, 2 * stages + 1):
        plan = _one_forward_one_backward(graph, microbatches, costs)
        check(plan, graph)
        assert simulate(plan, graph, costs).seconds == (microbatches + stages - 1) * sum(seconds)


@pytest.mark.parametrize(("teacher", "language"), [(1, 2), (1, 4), (3, 4), (2, 2), (5, 2)])
@pytest.mark.parametrize("seconds", SECONDS)
def test_1f1b_of_what_feeds_the_last_stage(teacher: int, language: int, seconds: Any) -> None:
    """A frozen module that feeds the last stage works beside the stages before it, and costs only what it is longer."""
    graph = ModuleGraph(
        modules=(
            _module("language", 0, language),
            attrs.evolve(_module("teacher", language, teacher, trains=False), feeds="last"),
        ),
        arrows=(("teacher", "language"),),
    )
    costs = _costs(graph, seconds)
    late = max(0, teacher - (language - 1)) * seconds[0]
    for microbatches in _some(1, language, 2 * language + 1):
        plan = _one_forward_one_backward(graph, microbatches, costs)
        check(plan, graph)
        assert [edge.name for edge in graph.inputs(StageId("language", language - 1))][-1] == "teacher->language"
        assert simulate(plan, graph, costs).seconds == (microbatches + language - 1) * sum(seconds) + late


@pytest.mark.parametrize("pp", PIPELINES)
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaved(pp: int, chunks: int) -> None:
    """With n a multiple of p the bubble of 1F1B over V, of which a chunk takes a share."""
    graph = _pipeline(pp, chunks=chunks)
    seconds = [Fraction(each, chunks) for each in (3, 2, 5)]
    costs = _costs(graph, seconds)
    for microbatches in _some(pp, 2 * pp):
        plan = interleaved(graph, microbatches, Interleaved(), costs)
        bubble = Fraction((pp - 1) * (3 + 2 + 5), chunks)
        _assert_exact(simulate(plan, graph, costs), bubble=bubble, work=microbatches * (3 + 2 + 5))


def test_the_far_corner() -> None:
    """The same with 16 stages, 4 chunks and 64 microbatches, and the others with as many."""
    graph, chunked = _pipeline(16), _pipeline(16, chunks=4)
    costs = _costs(chunked, SECONDS[1])
    plan = interleaved(chunked, 64, Interleaved(), costs)
    _assert_exact(simulate(plan, chunked, costs), bubble=15 * 10, work=64 * 4 * 10)
    costs = _costs(graph, SECONDS[1])
    plan = _one_forward_one_backward(graph, 64, costs)
    _assert_exact(simulate(plan, graph, costs), bubble=15 * 10, work=64 * 10)
    costs = _costs(graph, (1, 1, 1))
    bubbles = [simulate(zero_bubble(graph, 64, ZeroBubble(form=form), costs), graph, costs).bubble for form in FORMS]
    assert bubbles == [15, 0]


@pytest.mark.parametrize("pp", PIPELINES)
def test_zb_h1(pp: int) -> None:
    """With n >= p and F = B_in = W the bubble is (p - 1)(F + B_in - W)."""
    graph = _pipeline(pp)
    unit = Fraction(2, 3)
    costs = _costs(graph, [unit] * 3)
    for microbatches in _some(pp, pp + 1, 2 * pp - 1):
        plan = zero_bubble(graph, microbatches, ZeroBubble(form="h1"), costs)
        result = simulate(plan, graph, costs)
        assert result.bubble == (pp - 1) * unit
        assert isinstance(result.bubble, (int, Fraction))


@pytest.mark.parametrize("pp", PIPELINES)
def test_zb_h2(pp: int) -> None:
    """With n >= 2p - 1 and F = B_in = W the bubble is (p - 1)(F + B_in - 2W), which is none."""
    graph = _pipeline(pp)
    unit = Fraction(2, 3)
    costs = _costs(graph, [unit] * 3)
    for microbatches in _some(2 * pp - 1, 2 * pp + 2):
        plan = zero_bubble(graph, microbatches, ZeroBubble(form="h2"), costs)
        assert simulate(plan, graph, costs).bubble == 0


@pytest.mark.parametrize("form", FORMS)
def test_zero_bubble_steps(form: Form) -> None:
    """Ranks are shifted by a forward each: the last begins (p - 1)F after the first, and has as long a span in H2."""
    graph = _pipeline(8)
    costs = _costs(graph, [1, 1, 1])
    result = simulate(zero_bubble(graph, 24, ZeroBubble(form=form), costs), graph, costs)
    assert result.seconds == 24 * 3 + 7
    assert result.bubble == (7 if form == "h1" else 0)


@pytest.mark.parametrize("pp", PIPELINES)
@pytest.mark.parametrize("seconds", SECONDS)
def test_a_frozen_language_model_behind_a_trained_encoder(pp: int, seconds: Any) -> None:
    """Its stages pass gradients on and compute none of their own: W = 0 and B = B_in, in a pipeline of p + 1 stages."""
    forward, input_gradient, _ = seconds
    graph = ModuleGraph(
        modules=(_module("vision", pp, 1), _module("language", 0, pp, trains=False)), arrows=(("vision", "language"),)
    )
    costs = _costs(graph, seconds)
    encoder = graph.stages[0]
    equal = {encoder: _costs(graph, (forward, 0, input_gradient)).stages[encoder]}
    costs = Costs(stages={**costs.stages, **equal})
    for microbatches in _some(1, 2 * pp + 1):
        plan = _one_forward_one_backward(graph, microbatches, costs)
        each = forward + input_gradient
        _assert_exact(simulate(plan, graph, costs), bubble=pp * each, work=microbatches * each)


@pytest.mark.parametrize("pp", PIPELINES)
@pytest.mark.parametrize("encoder", [1, 3])
def test_a_frozen_encoder(pp: int, encoder: int) -> None:
    """It runs no backward (B = 0): it delays the language model by its own forwards and leaves its bubble as it is."""
    graph = ModuleGraph(
        modules=(_module("vision", pp, encoder, trains=False), _module("language", 0, pp)),
        arrows=(("vision", "language"),),
    )
    costs = _costs(graph, (2, 3, 4))
    for microbatches in _some(pp, 2 * pp + 1):
        result = simulate(_one_forward_one_backward(graph, microbatches, costs), graph, costs)
        assert result.bubble == (pp - 1) * 9
        assert result.seconds == encoder * 2 + (microbatches + pp - 1) * 9


@pytest.mark.parametrize(("first", "second"), [((2, 3), (1, 5)), ((2, 3), (3, 4)), ((1, 4), (4, 1)), ((3, 2), (1, 7))])
@pytest.mark.parametrize("transfer", [0, Fraction(1, 2)])
def test_encoders_side_by_side(first: tuple[int, int], second: tuple[int, int], transfer: Any) -> None:
    """Warm-up takes the longest path of the graph, not the sum of its paths: (stages, seconds a stage) of each."""
    shapes = {"vision": first, "audio": second}
    modules = (_module("vision", 4, first[0]), _module("audio", 8, second[0]), _module("language", 0, 2))
    graph = ModuleGraph(modules=modules, arrows=(("vision", "language"), ("audio", "language")))
    even = {module: _costs(graph, (shapes.get(module, (2, 3))[1], 1, 1)) for module in graph.by_name}
    costs = Costs(
        stages={stage: even[stage.module].stages[stage] for stage in graph.stages},
        message_bytes={edge.name: 1 for edge in graph.edges},
        link=Link(latency=transfer),
    )
    plan = _one_forward_one_backward(graph, 6, costs)
    check(plan, graph)
    result = simulate(plan, graph, costs)
    start = min(bar.start for bar in result.timeline.bars if bar.action.stage_id == ("language", 0))
    assert start == max(stages * (seconds + transfer) for stages, seconds in shapes.values())
    assert result.bubbles[0]["warm-up"] == start
