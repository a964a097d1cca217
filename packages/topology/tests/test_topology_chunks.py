"""Modules of several chunks: which stages lie where, the edges between them, what is tied, and passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mimo.hooks import ConfigError
from mimo.topology import Grid, Module, ModuleGraph, Placement, StageId, needed_groups


def language(pp: int, chunks: int, placement: Placement, *, first: int = 0, tied: bool = False, **sizes: int) -> Module:
    """Return a module that trains everywhere."""
    size = pp * sizes.get("dp", 1) * sizes.get("tp", 1)
    grid = Grid(name="language", ranks=range(first, first + size), pp=pp, **sizes)
    return Module(grid=grid, trains=(True,) * (pp * chunks), chunks=chunks, placement=placement, tied=tied)


@pytest.mark.parametrize(
    ("pp", "chunks", "placement", "places"),
    [
        (3, 1, "loop", [0, 1, 2]),
        (3, 1, "v", [0, 1, 2]),
        (2, 3, "loop", [0, 1, 0, 1, 0, 1]),
        (2, 3, "v", [0, 1, 1, 0, 0, 1]),
        (3, 2, "v", [0, 1, 2, 2, 1, 0]),
        (1, 2, "v", [0, 0]),
    ],
)
def test_topology_stages_go_round_or_to_and_fro(pp: int, chunks: int, placement: Placement, places: list[int]) -> None:
    """Stages count on from chunk to chunk; every pipeline rank holds one of each, in ascending order."""
    module = language(pp, chunks, placement, tp=2)
    assert module.stages == pp * chunks
    assert [module.pipeline_rank(stage) for stage in range(module.stages)] == places
    for stage, place in enumerate(places):
        assert module.stage_ranks(stage) == module.grid.stage_ranks(place)
    for place in range(pp):
        held = module.stages_at(place)
        assert held == tuple(stage for stage, at in enumerate(places) if at == place)
        assert [stage // pp for stage in held] == list(range(chunks))


@pytest.mark.parametrize(
    ("pp", "chunks", "placement", "tied"),
    [
        (2, 1, "loop", (0, 1)),
        (2, 2, "loop", (0, 3)),
        (2, 2, "v", ()),
        (2, 3, "v", (0, 5)),
        (1, 1, "loop", ()),
        (1, 2, "loop", ()),
    ],
)
def test_topology_only_copies_on_different_ranks_are_tied(
    pp: int, chunks: int, placement: Placement, tied: tuple[int, ...]
) -> None:
    """Where the first and the last stage lie on the same ranks they share the parameter, and nobody is to add it up."""
    module = language(pp, chunks, placement, tied=True, dp=2)
    assert module.tied_stages == tied
    groups = needed_groups(ModuleGraph(modules=(module,), arrows=()))
    pairs = {(rank, rank + 2 * (pp - 1)) for rank in range(2)} if tied else set()
    assert {group for group in groups if len({module.grid.coordinates(rank).pp for rank in group}) > 1} == pairs


@pytest.mark.parametrize("trains", [(False, True, True, True), (True, True, True, False)])
def test_topology_a_frozen_copy_is_not_tied(trains: tuple[bool, ...]) -> None:
    """There is no gradient to add up."""
    grid = Grid(name="language", ranks=range(2), pp=2)
    assert Module(grid=grid, trains=trains, chunks=2, tied=True).tied_stages == ()


def test_topology_edges_join_all_stages_in_order() -> None:
    """They are named by stages, also where a V turns on the same ranks; a module's last stage may lie on its first."""
    vision = Module(grid=Grid(name="vision", ranks=range(2), pp=2), trains=(True,) * 4, chunks=2, placement="v")
    graph = ModuleGraph(modules=(vision, language(2, 2, "v", first=2, tp=2)), arrows=(("vision", "language"),))
    found = [(edge.name, graph.stage_ranks(edge.source), graph.stage_ranks(edge.target)) for edge in graph.edges]
    assert found == [
        ("vision.0-1", (0,), (1,)),
        ("vision.1-2", (1,), (1,)),
        ("vision.2-3", (1,), (0,)),
        ("vision->language", (0,), (2, 3)),
        ("language.0-1", (2, 3), (4, 5)),
        ("language.1-2", (4, 5), (4, 5)),
        ("language.2-3", (4, 5), (2, 3)),
    ]
    assert [edge.is_boundary for edge in graph.edges] == [False] * 3 + [True] + [False] * 3


def test_topology_each_stage_trains_for_itself() -> None:
    """Gradient flows from the first stage that trains on, wherever stages lie."""
    grid = Grid(name="language", ranks=range(2), pp=2)
    graph = ModuleGraph(modules=(Module(grid=grid, trains=(False, False, True, False), chunks=2),), arrows=())
    assert [edge.gradient for edge in graph.edges] == [False, False, True]
    assert [graph.runs_backward(stage) for stage in graph.stages] == [False, False, True, True]
    assert graph.without_training().by_name["language"].trains == (False,) * 4


@pytest.mark.parametrize(("placement", "first"), [("loop", (0, 2)), ("v", (0, 3))])
def test_topology_a_role_has_one_stage_of_each_chunk(placement: Placement, first: tuple[int, ...]) -> None:
    """A rank's stages come in the order of modules and stages, and ranks with the same ones share an actor."""
    vision = Module(grid=Grid(name="vision", ranks=(2, 3, 4), dp=3), trains=(True,))
    graph = ModuleGraph(modules=(vision, language(2, 2, placement, dp=2)), arrows=(("vision", "language"),))
    held = tuple(StageId("language", stage) for stage in first)
    others = tuple(StageId("language", stage) for stage in range(4) if stage not in first)
    eye = (StageId("vision", 0),)
    assert graph.role(1).stages == held
    assert graph.role(3).stages == eye + others
    assert graph.role(4).stages == eye
    assert [(actor.ranks, actor.stages) for actor in graph.actors] == [
        ((0, 1), held),
        ((2, 3), eye + others),
        ((4,), eye),
    ]


@pytest.mark.parametrize(
    ("factor", "microbatches", "passes"),
    [
        (1, 3, ((0,), (1,), (2,))),
        (2, 5, ((0, 1), (2, 3), (4,))),
        (4, 4, ((0, 1, 2, 3),)),
        (4, 1, ((0,),)),
    ],
)
def test_topology_passes_take_neighbours_and_the_last_what_is_left(
    factor: int, microbatches: int, passes: tuple[tuple[int, ...], ...]
) -> None:
    """Each microbatch is served once, in order."""
    module = Module(grid=Grid(name="vision", ranks=(0,)), trains=(True,), batch_factor=factor)
    assert module.passes(microbatches) == passes


@pytest.mark.parametrize("key", ["chunks", "batch_factor"])
@pytest.mark.parametrize("value", [0, -1])
def test_topology_counts_below_one_are_refused(key: str, value: int) -> None:
    """They are named by the setting."""
    make: Callable[..., Any] = Module
    with pytest.raises(ConfigError, match=rf"^modules\.eye\.{key}: expected 1 or more, got {value}"):
        make(grid=Grid(name="eye", ranks=(0,)), trains=(True,), **{key: value})
