"""The module graph: edges, gradient, actors, refusals."""

import attrs
import pytest

from mimo.hooks import ConfigError
from mimo.topology import Grid, Module, ModuleGraph, StageId


def module(name: str, ranks: range, trains: tuple[bool, ...] | None = None, **sizes: int) -> Module:
    """Make a module that trains everywhere by default."""
    grid = Grid(name=name, ranks=ranks, **sizes)
    return Module(grid=grid, trains=trains if trains is not None else (True,) * grid.pp)


def test_topology_edges_join_stages_and_modules() -> None:
    """Stages of a module are joined in order, and its last stage to stage 0 of what it feeds."""
    graph = ModuleGraph(
        modules=(module("language", range(2, 4), pp=2), module("vision", range(2), pp=2)),
        arrows=(("vision", "language"),),
    )
    assert graph.order == ("vision", "language")
    assert [(edge.name, edge.is_boundary) for edge in graph.edges] == [
        ("vision.0-1", False),
        ("vision->language", True),
        ("language.0-1", False),
    ]
    assert graph.edges[1].source == StageId("vision", 1)
    assert graph.edges[1].target == StageId("language", 0)


def test_topology_a_module_may_feed_the_last_stage() -> None:
    """Its edge then ends there, beside that of the stage before, and the stages before know nothing of it."""
    teacher = attrs.evolve(module("teacher", range(2), (False, False), pp=2), feeds="last")
    graph = ModuleGraph(modules=(module("language", range(2, 5), pp=3), teacher), arrows=(("teacher", "language"),))
    last = StageId("language", 2)
    assert graph.fed_stage("teacher", "language") == last
    assert [edge.name for edge in graph.inputs(last)] == ["language.1-2", "teacher->language"]
    assert [edge.gradient for edge in graph.inputs(last)] == [True, False]
    assert graph.inputs(StageId("language", 0)) == ()
    assert graph.outputs(StageId("teacher", 1)) == graph.inputs(last)[1:]


def test_topology_modules_may_follow_the_language_model() -> None:
    """Whatever trains before them, they send gradients back, frozen or not."""
    graph = ModuleGraph(
        modules=(
            module("drawer", range(4, 5), (False,)),
            module("language", range(2, 4), pp=2),
            module("vision", range(2), (False, True), pp=2),
        ),
        arrows=(("vision", "language"), ("language", "drawer"), ("vision", "drawer")),
    )
    assert graph.order == ("vision", "language", "drawer")
    into = graph.inputs(StageId("drawer", 0))
    assert {edge.name: edge.gradient for edge in into} == {"vision->drawer": True, "language->drawer": True}
    assert graph.runs_backward(StageId("drawer", 0))


def test_topology_gradient_flows_only_where_something_upstream_trains() -> None:
    """A frozen encoder stage sends no gradient back; a frozen language model still hands the projector its own."""
    graph = ModuleGraph(
        modules=(
            module("vision", range(2), (False, True), pp=2),
            module("language", range(2, 4), (False, False), pp=2),
        ),
        arrows=(("vision", "language"),),
    )
    assert [edge.gradient for edge in graph.edges] == [False, True, True]
    assert [graph.runs_backward(stage) for stage in graph.stages] == [False, True, True, True]
    assert not any(graph.without_training().runs_backward(stage) for stage in graph.stages)


def test_topology_ranks_with_the_same_role_share_an_actor() -> None:
    """Overlapping modules cut the ranks into those of one, of both, and of the other."""
    graph = ModuleGraph(
        modules=(module("vision", range(4), dp=4), module("language", range(2, 6), pp=2, dp=2)),
        arrows=(("vision", "language"),),
    )
    assert [actor.ranks for actor in graph.actors] == [(0, 1), (2, 3), (4, 5)]
    assert graph.actors[1].stages == (StageId("vision", 0), StageId("language", 0))
    assert graph.role(7).stages == ()


@pytest.mark.parametrize(
    ("arrows", "text"),
    [
        ([("a", "b"), ("b", "a")], r"edges without a circle, got (a -> b -> a|b -> a -> b)"),
        ([("a", "c")], r"edge between modules of \['a', 'b'\], got \('a', 'c'\)"),
        ([("a", "b"), ("a", "b")], "each edge once"),
    ],
)
def test_topology_wrong_arrows_are_refused(arrows: list[tuple[str, str]], text: str) -> None:
    """Circles, unknown ends and repeated arrows are named."""
    with pytest.raises(ConfigError, match=text):
        ModuleGraph(modules=(module("a", range(1)), module("b", range(1, 2))), arrows=tuple(arrows))


def test_topology_repeated_names_are_refused() -> None:
    """Two modules can't share a name."""
    with pytest.raises(ConfigError, match="expected distinct names"):
        ModuleGraph(modules=(module("a", range(1)), module("a", range(1, 2))), arrows=())


def test_topology_meeting_ranks_are_linked_by_lanes_and_experts() -> None:
    """Three neighbours of a lane and two of an expert group link six; without experts only the lane's meet."""
    grid = Grid(name="m", ranks=range(12), dp=4, cp=3, ep=2)
    assert Module(grid=grid, trains=(True,)).meeting_size == 3
    assert Module(grid=grid, trains=(True,), experts=True).meeting_size == 6
    assert Module(grid=Grid(name="m", ranks=range(4), dp=4), trains=(True,), experts=True).meeting_size == 1


def test_topology_all_ranks_of_a_stage_meet_where_parameters_are_gathered() -> None:
    """Over lanes, context and tensor ranks, whatever else they share."""
    grid = Grid(name="m", ranks=range(24), pp=2, dp=2, cp=3, tp=2)
    assert Module(grid=grid, trains=(True, True)).meeting_size == 6
    assert Module(grid=grid, trains=(True, True), gathers=True).meeting_size == 12


@pytest.mark.parametrize("shard_lanes", [-1, 4])
def test_topology_copies_are_spread_over_whole_shares_of_lanes(shard_lanes: int) -> None:
    """Six lanes don't fall into fours."""
    text = (
        r"^modules.m.optimizer.shard_lanes: expected a divisor of its 6 data lanes \(dp 2 x cp 3\), or 0 for all, got "
        rf"{shard_lanes}. Set optimizer.shard_lanes, or that of modules.m.optimizer, to one that divides them.$"
    )
    with pytest.raises(ConfigError, match=text):
        Module(grid=Grid(name="m", ranks=range(6), dp=2, cp=3), trains=(True,), shard_lanes=shard_lanes)
