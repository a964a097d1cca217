"""How far stages are in turns: what passes of other sizes demand of what feeds them, and what they give back."""

from __future__ import annotations

import random

from mimo.schedule.ahead.turns import turns_of
from mimo.topology import Grid, Module, ModuleGraph, StageId


def _graph(factors: dict[str, int], *arrows: tuple[str, str]) -> ModuleGraph:
    modules = tuple(
        Module(grid=Grid(name=name, ranks=(rank,)), trains=(True,), batch_factor=factor)
        for rank, (name, factor) in enumerate(factors.items())
    )
    return ModuleGraph(modules=modules, arrows=arrows)


def test_a_wider_pass_demands_more_of_its_source() -> None:
    """Three microbatches are begun for the first turn, and all end in it."""
    turns = turns_of(_graph({"a": 1, "b": 3}, ("a", "b")), 4)
    for stage in (StageId("a", 0), StageId("b", 0)):
        assert list(turns[stage].begun) == [0, 3, 3, 3, 4]
        assert list(turns[stage].ended) == [0, 3, 3, 3, 4]
        assert turns[stage].max_in_flight == 3


def test_a_wider_source_waits_for_all_gradients_of_its_pass() -> None:
    """What it feeds ends a microbatch a turn; it ends a pass with the last of these."""
    turns = turns_of(_graph({"a": 3, "b": 1}, ("a", "b")), 4)
    assert list(turns[StageId("a", 0)].begun) == [0, 3, 3, 3, 4]
    assert list(turns[StageId("a", 0)].ended) == [0, 0, 0, 3, 4]
    assert list(turns[StageId("b", 0)].begun) == list(turns[StageId("b", 0)].ended) == [0, 1, 2, 3, 4]


def test_demands_add_up_along_a_path_of_passes_that_do_not_divide_each_other() -> None:
    """For the second turn the pass 2, 3, 4 of three is half begun by passes of two, so a source holds up to four."""
    turns = turns_of(_graph({"a": 2, "b": 3}, ("a", "b")), 6)
    assert list(turns[StageId("a", 0)].begun) == [0, 4, 4, 4, 6, 6, 6]
    assert list(turns[StageId("a", 0)].ended) == [0, 2, 2, 2, 6, 6, 6]
    assert turns[StageId("a", 0)].max_in_flight == 4


def test_turns_keep_every_arrow_and_end_the_step() -> None:
    """Rows are there before they are needed, gradients too, and after the last turn nothing is left."""
    choice = random.Random(0)
    for _ in range(200):
        names = "abcd"[: choice.randint(2, 4)]
        arrows = [(low, high) for low in names for high in names if low < high and choice.random() < 0.6]
        graph = _graph({name: choice.randint(1, 4) for name in names}, *arrows)
        microbatches = choice.randint(1, 13)
        turns = turns_of(graph, microbatches)
        for own in turns.values():
            assert own.begun[-1] == own.ended[-1] == microbatches
            assert all(ended <= begun for ended, begun in zip(own.ended, own.begun, strict=True))
        for edge in graph.edges:
            source, target = turns[edge.source], turns[edge.target]
            assert all(have >= need for have, need in zip(source.begun, target.begun, strict=True))
            assert all(have <= come for have, come in zip(source.ended, target.ended, strict=True))
