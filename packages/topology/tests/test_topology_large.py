"""16,384 ranks, laid out without torch: what is enumerated there is right."""

import subprocess
import sys
from unittest.mock import Mock

import pytest

from mimo.topology import (
    AXES,
    EXPERT_AXES,
    Actor,
    Coordinates,
    ExpertCoordinates,
    Grid,
    Module,
    ModuleGraph,
    StageId,
    _groups,
    gradient_groups,
    needed_groups,
)

WORLD = 16_384


@pytest.fixture(scope="module")
def graph() -> ModuleGraph:
    """Return four modules: two of them overlap, one lies on every rank, and has experts and tied embeddings."""
    grids = (
        Grid(name="vision", ranks=range(4096), dp=512, cp=2, tp=4),
        Grid(name="audio", ranks=range(4096, 6144), dp=1024, tp=2),
        Grid(name="radio", ranks=range(2048, 6144, 2), pp=2, dp=1024),
        Grid(name="language", ranks=range(WORLD), pp=16, dp=16, cp=8, tp=8, ep=64, etp=2),
    )
    return ModuleGraph(
        modules=tuple(
            Module(grid=grid, trains=(True,) * grid.pp, tied=grid.name == "language", experts=grid.name == "language")
            for grid in grids
        ),
        arrows=tuple((grid.name, "language") for grid in grids[:-1]),
    )


@pytest.mark.parametrize("axis", sorted({*AXES, *EXPERT_AXES}))
def test_topology_large_groups_hold_every_rank_once(graph: ModuleGraph, axis: str) -> None:
    """Along each axis of both views of each module."""
    for module in graph.modules:
        groups = module.grid.groups((axis,))
        assert {len(group) for group in groups} == {getattr(module.grid, axis)}
        assert sorted(rank for group in groups for rank in group) == list(module.grid.ranks)


def test_topology_large_needed_groups_are_as_many_as_they_must_be(graph: ModuleGraph) -> None:
    """Counted by hand, axis by axis; those that two modules need are one."""
    vision = 1024 + 2048 + 4 + 1  # tensor, context, data, data and tensor
    audio = 1024 + 2 + 1
    radio = 2  # data in each stage, which are data and tensor too
    language = 2048 + 2048 + 16 * 8 + 16
    tied = 1024
    experts = 256 + 256 + 8192 + 128 + 2048  # rows of a lane, ep, etp, both, copies
    shared = 1024 + 1  # audio's tensor pairs split experts; half of its data ranks are radio's second stage
    needed = needed_groups(graph)
    assert len(set(needed)) == len(needed) == vision + audio + radio + language + tied + experts - shared


def test_topology_large_lanes_of_stages_are_spread_once_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 512 stages with two lanes each, every one has its own group for sums of gradients."""
    spread = Mock(wraps=_groups.spread)
    monkeypatch.setattr(_groups, "spread", spread)
    grid = Grid(name="language", ranks=range(1024), pp=512, dp=2)
    module = Module(grid=grid, trains=(True,) * grid.pp, overlaps=frozenset({"sums"}))
    found = gradient_groups(ModuleGraph(modules=(module,), arrows=()))
    assert found == tuple((StageId("language", stage), grid.stage_ranks(stage)) for stage in range(grid.pp))
    assert spread.call_count == grid.pp


def test_topology_large_any_rank_knows_where_everybody_is(graph: ModuleGraph) -> None:
    """Roles of ranks in one, two and three modules, computed by hand."""
    assert graph.role(5000).places == {
        "audio": Coordinates(pp=0, dp=452, cp=0, tp=0),
        "radio": Coordinates(pp=1, dp=452, cp=0, tp=0),
        "language": Coordinates(pp=4, dp=14, cp=1, tp=0),
    }
    assert graph.role(16_383).places == {"language": Coordinates(pp=15, dp=15, cp=7, tp=7)}
    assert graph.by_name["language"].grid.expert_coordinates(5000) == ExpertCoordinates(pp=4, edp=7, ep=4, etp=0)


def test_topology_large_actors_part_the_ranks_by_role(graph: ModuleGraph) -> None:
    """Every rank is in one actor, with the stages of its role."""
    ranks = [rank for actor in graph.actors for rank in actor.ranks]
    assert sorted(ranks) == list(range(WORLD))
    assert all(graph.role(actor.ranks[-1]).stages == actor.stages for actor in graph.actors)
    assert graph.actors[-1] == Actor(ranks=tuple(range(15_360, WORLD)), stages=(StageId("language", 15),))


def test_topology_large_needs_no_torch() -> None:
    """In a process of its own, since torch may be loaded here."""
    source = """
import sys
from mimo.topology import Grid, Module, ModuleGraph, needed_groups
grid = Grid(name="m", ranks=range(16384), pp=16, dp=128, tp=8, ep=64)
graph = ModuleGraph(modules=(Module(grid=grid, trains=(True,) * 16, experts=True),), arrows=())
print(len(needed_groups(graph)), len(graph.actors), graph.role(9).rank, sorted({"torch", "numpy"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)  # noqa: S603 -- ours
    assert done.stdout.split(maxsplit=3)[1:] == ["16", "9", "[]\n"]
