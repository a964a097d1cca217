"""An encoder that is divided at its seam: one module as the model is built, two in the graph of the plans."""

import pytest

from mimo.hooks import ConfigError
from mimo.topology import Grid, Module, ModuleGraph, Placement, StageId, gradient_groups, needed_groups


def encoder(*, pp: int = 1, chunks: int = 1, placement: Placement = "loop", seam: bool = True) -> Module:
    """Make an encoder of two lanes whose projector alone trains."""
    grid = Grid(name="vision", ranks=range(2 * pp), pp=pp, dp=2)
    trains = (False,) * (pp * chunks) + (True,) * seam
    return Module(
        grid=grid,
        trains=trains,
        chunks=chunks,
        placement=placement,
        batch_factor=3,
        recompute="full",
        gathers=True,
        shard_lanes=2,
        overlaps=frozenset({"sums"}),
        seam=seam,
    )


def joined(vision: Module) -> ModuleGraph:
    """Join an encoder to a language model on its ranks and another."""
    grid = Grid(name="language", ranks=range(1 + len(vision.grid.ranks)), dp=1 + len(vision.grid.ranks))
    return ModuleGraph(modules=(vision, Module(grid=grid, trains=(True,))), arrows=(("vision", "language"),))


def test_topology_a_seam_makes_two_modules_of_one() -> None:
    """The tower works ahead and runs no backward; the projector, which trains, feeds what the whole does."""
    graph = joined(encoder(pp=2)).divided()
    tower, projector, language = graph.modules
    assert (tower.name, tower.trains, tower.prefetch, tower.recompute) == ("vision", (False, False), True, "none")
    assert (projector.name, projector.trains, projector.prefetch) == ("vision.projector", (True,), False)
    assert (projector.grid.ranks, projector.grid.shape) == ((2, 3), (1, 2, 1, 1))
    assert (tower.projector_of, projector.projector_of, language.projector_of) == ("", "vision", "")
    for part in (tower, projector):
        kept = (part.batch_factor, part.gathers, part.shard_lanes, part.overlaps)
        assert kept == (3, True, 2, frozenset({"sums"}))
    edges = [(edge.name, edge.gradient) for edge in graph.edges]
    assert edges == [("vision.0-1", False), ("vision->vision.projector", False), ("vision.projector->language", True)]
    assert [graph.runs_backward(stage) for stage in graph.stages] == [False, False, True, True]


def test_topology_a_graph_without_a_seam_is_not_changed() -> None:
    """It is the very graph, so that plans are what they were."""
    graph = joined(encoder(seam=False))
    assert graph.divided() is graph


@pytest.mark.parametrize(("placement", "place"), [("loop", 1), ("v", 0)])
def test_topology_the_projector_lies_with_the_end_of_the_tower(placement: Placement, place: int) -> None:
    """As a stage of the module it is one more on those ranks, wherever chunks put the last of the tower."""
    module = encoder(pp=2, chunks=2, placement=placement)
    assert module.stages == 5
    assert module.pipeline_rank(4) == module.pipeline_rank(3) == place
    assert 4 in module.stages_at(place)
    assert 4 not in module.stages_at(1 - place)
    projector = joined(module).divided().by_name["vision.projector"]
    assert projector.grid.ranks == module.stage_ranks(4) == module.grid.stage_ranks(place)


def test_topology_a_seam_asks_for_no_group_more() -> None:
    """Groups are those of the module; only gradients that are summed early have one for the stage that trains."""
    graph = joined(encoder(pp=2))
    assert needed_groups(graph) == needed_groups(joined(encoder(pp=2, seam=False)))
    assert set(needed_groups(graph.divided())) == set(needed_groups(graph))
    assert gradient_groups(graph) == ((StageId("vision", 2), (2, 3)),)


def test_topology_in_evaluation_both_sides_are_in_their_own_step() -> None:
    """Nothing is ahead of anything there."""
    graph = joined(encoder()).divided().without_training()
    assert [module.first(4) for module in graph.modules] == [0, 0, 0]
    assert not any(edge.gradient for edge in graph.edges)


def test_topology_a_tower_that_trains_is_refused() -> None:
    """The tower of a seam follows the rule for all that is made ahead."""
    grid = Grid(name="vision", ranks=[0, 1], dp=2)
    module = Module(grid=grid, trains=(True, True), seam=True)
    with pytest.raises(ConfigError, match=r"^modules.vision.prefetch: expected a module of which nothing is trained"):
        joined(module).divided()


def test_topology_what_feeds_a_tower_must_be_ahead_too() -> None:
    """A projector is not, so nothing behind one can be."""
    modules = (encoder(), Module(grid=Grid(name="later", ranks=[0]), trains=(False,), prefetch=True))
    language = Module(grid=Grid(name="language", ranks=[0]), trains=(True,))
    graph = ModuleGraph(
        modules=(*(module for module in modules if module.name == "vision"), language),
        arrows=(("vision", "language"),),
    )
    assert graph.divided().by_name["vision"].prefetch
    with pytest.raises(ConfigError, match=r"^modules.later.prefetch: expected that what feeds it is made ahead too"):
        ModuleGraph(modules=(*modules, language), arrows=(("vision", "later"), ("later", "language")))
