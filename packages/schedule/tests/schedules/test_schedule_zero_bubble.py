"""Zero-bubble plans on graphs that one can draw: their orders, bubbles and memory, frozen parts, and refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from itertools import accumulate

import pytest

from mimo.hooks import ConfigError
from mimo.schedule import Costs, Plan, check, in_flight, simulate
from mimo.schedule.schedules.one_forward_one_backward import OneForwardOneBackward
from mimo.schedule.schedules.one_forward_one_backward import generate as one_forward_one_backward
from mimo.schedule.schedules.zero_bubble import Form, ZeroBubble, generate, placement
from mimo.schedule.testing import emulate
from mimo.topology import Grid, Module, ModuleGraph, Placement, StageId

THREE_CHUNKS = (
    r"^modules\.l\.chunks: expected 2 with schedule\.form = 'v', got 3\. "
    r"Set it to 2, or choose schedule\.plugin = 'interleaved'\.$"
)
LETTERS = {"forward": "F", "input-gradient": "I", "weight-gradient": "W", "backward": "B"}


def _module(
    name: str,
    ranks: Sequence[int],
    *,
    pp: int = 1,
    chunks: int = 1,
    trains: bool | tuple[bool, ...] = True,
    batch_factor: int = 1,
) -> Module:
    lie: Placement = "v" if chunks > 1 else "loop"
    flags = trains if isinstance(trains, tuple) else (trains,) * pp * chunks
    grid = Grid(name=name, ranks=ranks, pp=pp, dp=len(ranks) // pp)
    return Module(grid=grid, trains=flags, chunks=chunks, placement=lie, batch_factor=batch_factor)


def _pipeline(ranks: int, *, chunks: int = 1, trains: bool | tuple[bool, ...] = True) -> ModuleGraph:
    return ModuleGraph(modules=(_module("l", range(ranks), pp=ranks, chunks=chunks, trains=trains),), arrows=())


def _plan(graph: ModuleGraph, microbatches: int, form: Form) -> Plan:
    """Return the plan, proved and emulated."""
    plan = generate(graph, microbatches, ZeroBubble(form=form), Costs.even(graph))
    check(plan, graph)
    emulate(plan, graph)
    return plan


def _order(plan: Plan, rank: int, module: str = "l") -> str:
    """Return the computations of a rank in brief, such as ``F0 F1 B0``; of chunks the second as ``f0``."""
    held = sorted({action.stage for action in plan.actions_of(rank) if action.module == module})
    texts = [
        (LETTERS[action.kind] if action.stage == held[0] else LETTERS[action.kind].lower())
        + str(action.microbatches[0])
        for action in plan.actions_of(rank)
        if action.kind in LETTERS and action.module == module
    ]
    return " ".join(texts)


def test_the_order_of_h1() -> None:
    """Ranks warm up as in 1F1B; a later one defers as many weight gradients as it warmed up less."""
    plan = _plan(_pipeline(3), 5, "h1")
    assert _order(plan, 0) == "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"
    assert _order(plan, 1) == "F0 F1 I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4"
    assert _order(plan, 2) == "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4"


def test_the_order_of_h2() -> None:
    """Ranks warm up until the first gradient is there, and so never wait afterwards."""
    plan = _plan(_pipeline(2), 4, "h2")
    assert _order(plan, 0) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert _order(plan, 1) == "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"


def test_the_order_of_a_v() -> None:
    """The first rank holds the last stage too: it goes back at once, and the second one turns."""
    plan = _plan(_pipeline(2, chunks=2), 4, "v")
    assert _order(plan, 0) == "F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 B0 f2 i2 w2 B1 f3 i3 w3 B2 B3"
    assert _order(plan, 1) == "F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("microbatches", [6, 11, 13])
def test_bubbles_are_those_of_the_paper(ranks: int, microbatches: int) -> None:
    """Where all kinds take a second, H1 waits one for each further rank, H2 and a V never."""
    bubbles: Mapping[Form, int] = {"h1": ranks - 1, "h2": 0, "v": 0}
    for form, bubble in bubbles.items():
        graph = _pipeline(ranks, chunks=2 if form == "v" else 1)
        if microbatches >= (2 * ranks if form == "v" else 2 * ranks - 1):
            plan = _plan(graph, microbatches, form)
            assert simulate(plan, graph, Costs.even(graph)).bubble == bubble, form


def _most_kept(plan: Plan, rank: int) -> int:
    """Return the most passes of all stages that a rank keeps at once, from forward to weight gradient."""
    changes = {"forward": 1, "weight-gradient": -1, "backward": -1}
    return max(accumulate(changes.get(action.kind, 0) for action in plan.actions_of(rank)))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_memory_is_that_of_the_paper(ranks: int) -> None:
    """H1 keeps as many microbatches as 1F1B's first rank on each, H2 not quite twice as many, a V as many in halves."""
    kept: Mapping[Form, int] = {"h1": ranks, "h2": 2 * ranks - 1, "v": 2 * ranks}
    for form, most in kept.items():
        plan = _plan(_pipeline(ranks, chunks=2 if form == "v" else 1), 12, form)
        assert max(_most_kept(plan, rank) for rank in range(ranks)) == most, form
        if form != "v":
            assert max(in_flight(plan).values()) == most


@pytest.mark.parametrize("microbatches", range(1, 9))
def test_few_microbatches_are_enough_for_h1_and_a_v(microbatches: int) -> None:
    """With fewer than fill the pipeline their plans have a bubble, but are sound."""
    _plan(_pipeline(4), microbatches, "h1")
    _plan(_pipeline(4, chunks=2), microbatches, "v")


def test_a_stage_that_only_passes_gradients_on_has_no_weight_gradient() -> None:
    """Its backward is whole; stages before it that train split theirs, and those before all that train run none."""
    plan = _plan(_pipeline(4, trains=(False, True, False, True)), 4, "h1")
    assert [set(_order(plan, rank)) & set("FBIW") for rank in range(4)] == [
        {"F"},
        {"F", "I", "W"},
        {"F", "B"},
        {"F", "I", "W"},
    ]


def test_ranks_without_a_backward_do_not_run_away() -> None:
    """The frozen front of a pipeline is ahead by as many microbatches as keep the rest busy, not by all."""
    plan = _plan(_pipeline(3, trains=(False, True, True)), 16, "h1")
    graph = _pipeline(3, trains=(False, True, True))
    assert emulate(plan, graph).receive_buffers[1] <= 2 * (3 + 1)


def test_an_encoder_on_one_rank_has_whole_backwards() -> None:
    """Nobody waits for the gradient of its inputs, so that nothing is gained by splitting."""
    graph = ModuleGraph(
        modules=(_module("v", (0,)), _module("l", (1, 2), pp=2)),
        arrows=(("v", "l"),),
    )
    plan = _plan(graph, 4, "h1")
    assert _order(plan, 0, "v") == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert _order(plan, 1) == "F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3"


@pytest.mark.parametrize("form", ["h1", "h2"])
def test_a_pipelined_encoder_is_ahead_of_the_language_model(form: Form) -> None:
    """Its stages warm up as those of one long pipeline would, and the step takes less than with 1F1B."""
    graph = ModuleGraph(
        modules=(_module("v", (0, 1), pp=2), _module("l", (2, 3), pp=2)),
        arrows=(("v", "l"),),
    )
    plan = _plan(graph, 12, form)
    warm = {"h1": ["F0 F1 F2 F3 B0", "F0 F1 F2 I0"], "h2": ["F0 F1 F2 F3 F4 F5 F6 B0", "F0 F1 F2 F3 F4 I0"]}[form]
    assert [_order(plan, rank, "v")[: len(warm[rank])] for rank in (0, 1)] == warm
    costs = Costs.even(graph)
    whole = one_forward_one_backward(graph, 12, OneForwardOneBackward(), costs)
    assert simulate(plan, graph, costs).seconds < simulate(whole, graph, costs).seconds


def test_chunks_lie_in_a_v_for_that_form_alone() -> None:
    """The trainer lays stages out as the form says."""
    assert [placement(ZeroBubble(form=form)) for form in ("h1", "h2", "v")] == ["loop", "loop", "v"]


def test_a_form_that_there_is_not_is_refused() -> None:
    """The error lists those that there are."""
    with pytest.raises(ConfigError, match=r"^schedule\.form: expected one of h1, h2, v, got 'h3'"):
        ZeroBubble(form="h3")  # type: ignore[arg-type] # what a user may write


def test_too_few_microbatches_for_h2_are_refused() -> None:
    """The error says the smallest number that works for all pipelines."""
    with pytest.raises(
        ConfigError,
        match=r"^microbatches: expected 2 x modules\.l\.pp - 1 = 7 or more in a step, got 6\. "
        r"The smallest that works is 7; a step has run\.global_batch / \(run\.micro_batch x lanes\)\.$",
    ):
        _plan(_pipeline(4), 6, "h2")
    graph = ModuleGraph(
        modules=(_module("v", range(3), pp=3, batch_factor=3), _module("l", range(4, 8), pp=4)), arrows=(("v", "l"),)
    )
    with pytest.raises(
        ConfigError,
        match=r"^microbatches: expected 2 x modules\.v\.pp - 1 = 5 or more passes of 3 microbatches in a step, "
        r"got 12\. The smallest that works is 13; a step",
    ):
        _plan(graph, 12, "h2")
    _plan(graph, 13, "h2")


def test_other_chunks_than_a_form_has_are_refused() -> None:
    """A V needs two in some module and no more in any; the others do with one."""
    with pytest.raises(ConfigError, match=r"^modules\.l\.chunks: expected 2 with schedule\.form = 'v'.*got 1\."):
        _plan(_pipeline(2), 4, "v")
    with pytest.raises(ConfigError, match=THREE_CHUNKS):
        _plan(_pipeline(2, chunks=3), 4, "v")
    with pytest.raises(ConfigError, match=r"^modules\.l\.chunks: expected 1 with schedule\.form = 'h1', got 2\."):
        _plan(_pipeline(2, chunks=2), 4, "h1")


@pytest.mark.parametrize("form", ["h1", "h2", "v"])
def test_evaluation_asks_for_nothing(form: Form) -> None:
    """Where nothing trains one microbatch and one chunk will do for any form."""
    plan = _plan(_pipeline(3).without_training(), 1, form)
    assert _order(plan, 2) == "F0"


def test_it_is_registered_as_a_plugin() -> None:
    """The entry point leads to the hook that returns its spec."""
    (entry,) = entry_points(group="mimo.schedules", name="zero-bubble")
    (spec,) = entry.load().mimo_register_schedules()
    assert (spec.name, spec.config, spec.generate) == ("zero-bubble", ZeroBubble, generate)


def test_stages_of_one_rank_are_distinct() -> None:
    """In a V of three ranks the turn lies on the last: its edge joins two stages of one rank."""
    graph = _pipeline(3, chunks=2)
    edge = next(edge for edge in graph.edges if edge.name == "l.2-3")
    assert graph.stage_ranks(StageId("l", 2)) == graph.stage_ranks(StageId("l", 3)) == (2,)
    plan = _plan(graph, 6, "v")
    own = [action for action in plan.actions_of(2) if action.edge == edge.name]
    assert len(own) == 6 * 4
