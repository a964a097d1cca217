"""The executor on one rank, and on one end of an edge: passes, split backward, and what is kept."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from executor_step import (
    FIRST,
    LAST,
    ROWS,
    SPLIT,
    VISION,
    Ends,
    Line,
    Program,
    Step,
    at_home,
    compare,
    executor_of,
    graph_of,
    in_turn,
    only,
    programs_of,
    separate,
    steps_of,
    truth,
)

from mimo.schedule import ActionKind
from mimo.topology import Grid, Module, ModuleGraph


@pytest.mark.parametrize("vision", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("backward", [("backward",), SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize("batch_factor", [1, 2, 3, 4])
def test_schedule_executor_gives_the_gradients_of_plain_autograd(
    batch_factor: int, backward: tuple[ActionKind, ...], vision: bool
) -> None:
    """Whatever one pass serves, whether weights come later, and with edges between stages of one rank."""
    graph = graph_of(vision=vision, batch_factor=batch_factor)
    programs = programs_of(graph)
    executor_of(graph, programs).run(in_turn(graph, steps_of(graph, backward)), at_home)
    compare(programs, truth(graph))
    passes = graph.by_name["vision"].passes(len(ROWS))
    assert [call for call in programs[VISION].calls if call.startswith("forward")] == [f"forward {it}" for it in passes]
    split = backward == SPLIT
    assert programs[VISION].calls.count("later") == (len(passes) if split and vision else 0)
    assert programs[LAST].calls.count("later") == (len(ROWS) if split else 0)


@pytest.mark.parametrize("backward", [("backward",), SPLIT], ids=["whole", "split"])
def test_schedule_executor_gives_the_gradients_of_any_graph(backward: tuple[ActionKind, ...]) -> None:
    """An encoder, a frozen teacher that feeds the last stage, and two modules behind the language model, one frozen."""
    graph = ModuleGraph(
        modules=(
            *graph_of().modules,
            Module(grid=Grid(name="teacher", ranks=(0,)), trains=(False,), feeds="last"),
            Module(grid=Grid(name="talker", ranks=(0,)), trains=(False,)),
            Module(grid=Grid(name="drawer", ranks=(0,)), trains=(True,), batch_factor=2),
        ),
        arrows=(
            ("vision", "language"),
            ("teacher", "language"),
            ("language", "talker"),
            ("language", "drawer"),
            ("vision", "drawer"),
        ),
    )
    programs, expected = programs_of(graph), truth(graph)
    executor_of(graph, programs).run(in_turn(graph, steps_of(graph, backward)), at_home)
    compare(programs, expected)
    trained = {stage.module for stage, gradient in expected.items() if gradient is not None}
    assert trained == {"vision", "language", "drawer"}


@pytest.mark.parametrize("known", [1, 16])
def test_schedule_executor_runs_several_plans_in_turn(monkeypatch: pytest.MonkeyPatch, known: int) -> None:
    """Each is looked up for itself, and again where it has been forgotten; a copy of one is another."""
    monkeypatch.setattr("mimo.schedule.runtime.executor._MOST_PLANS", known)
    graph = graph_of()
    plans = [in_turn(graph, steps_of(graph, backward)) for backward in (("backward",), SPLIT)]
    programs, expected = programs_of(graph), truth(graph)
    executor = executor_of(graph, programs)
    for number in (0, 1, 0, 1, 1):
        for program in programs.values():
            program.weight.grad = None
            program.calls.clear()
        executor.run(attrs.evolve(plans[number]), at_home)
        compare(programs, expected)
        assert ("later" in programs[LAST].calls) == (number == 1)


def test_schedule_executor_adds_deferred_gradients_when_their_turn_comes() -> None:
    """Until then, no weight has a gradient, the first stage's included, which has no input gradient to compute."""
    graph = graph_of()
    programs = programs_of(graph)
    seen: list[list[bool]] = []

    @attrs.frozen
    class Watched:
        inner: Program

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def reduce_gradients(self) -> None:
            seen.append([program.weight.grad is not None for program in programs.values()])

    steps = steps_of(graph, SPLIT)
    weights = [step for step in steps if step[0] == "weight-gradient"]
    later = [*(step for step in steps if step not in weights), *sorted(weights, key=lambda step: step[1])]
    watched = {stage: Watched(program) for stage, program in programs.items()}
    executor_of(graph, watched).run(in_turn(graph, later), at_home)
    assert seen == [[False, True, False], [False, True, True], [True, True, True]]
    compare(programs, truth(graph))


@pytest.mark.parametrize("left", ["weight-gradient", "backward"])
def test_schedule_executor_asserts_that_nothing_is_left_over(left: ActionKind) -> None:
    """A plan that was not proved and forgets a gradient does not pass for a step."""
    graph = graph_of()
    steps = steps_of(graph, SPLIT if left == "weight-gradient" else ("backward",))
    plan = in_turn(graph, steps)
    (actor,) = plan.actors
    forgotten = next(action for action in actor.actions if action.kind == left and action.stage_id == VISION)
    actions = tuple(action for action in actor.actions if action != forgotten)
    plan = attrs.evolve(plan, actors=(attrs.evolve(actor, actions=actions),))
    with pytest.raises(AssertionError, match="never computed" if left == "weight-gradient" else "without a backward"):
        executor_of(graph, programs_of(graph)).run(plan, at_home)


def test_schedule_executor_keeps_activations_until_their_backward_and_no_longer() -> None:
    """Of one microbatch at a time, however many there are, and nothing after the step."""
    graph = graph_of()
    steps: list[Step] = []
    for microbatch in range(len(ROWS)):
        steps += [("forward", stage, (microbatch,)) for stage in graph.stages]
        steps += [("backward", stage, (microbatch,)) for stage in reversed(graph.stages)]
    programs = programs_of(graph)
    executor_of(graph, programs).run(in_turn(graph, steps), at_home)
    assert {stage: program.live for stage, program in programs.items()} == dict.fromkeys(graph.stages, [0] * len(ROWS))
    gathered = programs_of(graph)
    executor_of(graph, gathered).run(in_turn(graph, steps_of(graph)), at_home)
    assert gathered[LAST].live == [0, 1, 2, 3]  # as many as are in flight: the count shows it
    assert not [product for program in gathered.values() for product in program.products if product() is not None]


def test_schedule_executor_keeps_nothing_of_what_is_frozen() -> None:
    """A stage without backward keeps no activations while those behind it do."""
    graph = graph_of(vision=False)
    programs = programs_of(graph)
    executor_of(graph, programs).run(in_turn(graph, steps_of(graph)), at_home)
    assert programs[VISION].live == [0] * len(ROWS)


@pytest.mark.parametrize("backward", [("backward",), SPLIT], ids=["whole", "split"])
def test_schedule_executor_announces_when_a_stage_computes_and_adds(backward: tuple[ActionKind, ...]) -> None:
    """Each forward and backward has its bounds, a pass without rows too, and the last that adds is known as such."""
    graph = graph_of()
    programs = programs_of(graph)
    executor_of(graph, programs).run(in_turn(graph, steps_of(graph, backward)), at_home)
    is_whole, times = len(backward) == 1, len(ROWS)
    computes = ["backward", "over"]
    passes = [["adds", *computes, "added"] if is_whole else computes for _ in ROWS]
    later = [] if is_whole else [["adds later", "added"] for _ in ROWS]
    expected = [phase for each in (*passes, *later) for phase in each]
    expected[-1] = "added last"
    assert programs[VISION].phases == ["forward", "over"] * times + expected


def test_schedule_executor_lets_go_of_outputs_that_have_left_and_of_inputs_that_are_read() -> None:
    """Before their backward, where autograd does not need them: the graph's ends are kept, not their tensors."""
    counts = 2 * ROWS
    graph = graph_of(language=(1,))
    plan = in_turn(graph, steps_of(graph, count=len(counts)))
    kinds = {"forward", "send", "backward", "receive"}
    source, target = Ends("vision->language", counts), Ends("language.0-1", counts)
    sending: Any = {VISION: source}
    executor_of(graph, sending, 0, Line()).run(only(plan, 0, kinds), separate(0, counts))
    assert source.live == [(0, 4)]  # a channel keeps its last four messages until they have been waited for
    assert source.weight.grad is not None
    receiving: Any = {FIRST: target, LAST: Ends(None, counts)}
    executor_of(graph, receiving, 1, Line()).run(only(plan, 1, kinds), separate(1, counts))
    assert target.live == [(0, 5)]  # all rows that the next stage, which has yet to begin, is to read
    assert target.weight.grad is not None
