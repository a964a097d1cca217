"""Which groups of ranks a graph needs."""

import itertools

from mimo.topology import Grid, Module, ModuleGraph, Overlap, gather_groups, gradient_groups, needed_groups, tied_pairs


def test_topology_identical_groups_are_shared_and_single_ones_left_out() -> None:
    """Overlapping modules that need the same ranks have one group for them; a group of one is none."""
    vision, language = Grid(name="vision", ranks=range(3), tp=3), Grid(name="language", ranks=range(1, 3), dp=2)
    graph = ModuleGraph(
        modules=(Module(grid=vision, trains=(True,)), Module(grid=language, trains=(True,))),
        arrows=(("vision", "language"),),
    )
    assert needed_groups(graph) == ((0, 1, 2), (1, 2))


def test_topology_groups_of_the_expert_view_exist_only_for_experts() -> None:
    """The same grid, with and without a mixture in it: groups that both views have stay one."""
    grid = Grid(name="language", ranks=range(8), dp=2, cp=2, tp=2, ep=2, etp=2)

    def needed(*, experts: bool) -> tuple[tuple[int, ...], ...]:
        return needed_groups(
            ModuleGraph(modules=(Module(grid=grid, trains=(True,), experts=experts),), arrows=()),
        )

    plain = needed(experts=False)
    assert plain == (
        *((0, 1), (2, 3), (4, 5), (6, 7)),  # tensor
        *((0, 2), (1, 3), (4, 6), (5, 7)),  # context
        *((0, 2, 4, 6), (1, 3, 5, 7)),  # data: lanes and context
        tuple(range(8)),  # data and tensor
    )
    # etp is tp here, and ep is cp: of the expert view only its copies and the ranks of one lane's rows are new.
    assert needed(experts=True) == (*plain, (0, 1, 2, 3), (4, 5, 6, 7), (0, 4), (1, 5), (2, 6), (3, 7))


def test_topology_experts_across_lanes_and_tensor_ranks_have_groups_of_their_own() -> None:
    """Four of them, over 2 lanes x 2 tensor ranks, cross both axes of the first view."""
    grid = Grid(name="language", ranks=[0, 2, 4, 6], dp=2, tp=2, ep=4)
    graph = ModuleGraph(modules=(Module(grid=grid, trains=(True,), experts=True),), arrows=())
    assert needed_groups(graph) == ((0, 2), (4, 6), (0, 4), (2, 6), (0, 2, 4, 6))


def test_topology_tied_pairs_join_first_and_last_stage() -> None:
    """Each place in stage 0 is paired with the same place in the last stage; one stage pairs with itself."""
    assert tied_pairs(Grid(name="m", ranks=range(6), pp=3, tp=2)) == ((0, 4), (1, 5))
    assert tied_pairs(Grid(name="m", ranks=range(2), tp=2)) == ((0,), (1,))


def test_topology_every_rank_finds_its_groups_among_those_that_are_made() -> None:
    """Whatever a rank asks for along needed axes, of any module, is in the list, and each is in it once."""
    graph = ModuleGraph(
        modules=(
            Module(grid=Grid(name="vision", ranks=range(6), dp=3, tp=2), trains=(True,)),
            Module(
                grid=Grid(name="language", ranks=range(4, 20), pp=2, dp=2, cp=2, tp=2, ep=4, etp=2),
                trains=(True, True),
                tied=True,
                experts=True,
            ),
        ),
        arrows=(("vision", "language"),),
    )
    needed = needed_groups(graph)
    assert len(set(needed)) == len(needed)
    along = [("tp",), ("cp",), ("dp", "cp"), ("dp", "cp", "tp"), ("cp", "tp"), ("ep",), ("etp",), ("ep", "etp")]
    for module, axes in itertools.product(graph.modules, [*along, ("edp",)]):
        for rank in module.grid.ranks:
            group = module.grid.group_of(rank, axes)
            assert len(group) == 1 or not (module.experts or axes in along[:4]) or group in needed


def test_topology_copies_spread_over_some_lanes_need_groups_of_their_own() -> None:
    """Four lanes in twos: each two hold a copy together, and those that hold the same half make another group."""
    grid = Grid(name="vision", ranks=range(4), dp=4)

    def needed(shard_lanes: int) -> tuple[tuple[int, ...], ...]:
        module = Module(grid=grid, trains=(True,), shard_lanes=shard_lanes)
        return needed_groups(ModuleGraph(modules=(module,), arrows=()))

    assert needed(1) == needed(0) == needed(4) == ((0, 1, 2, 3),)
    assert needed(2) == ((0, 1, 2, 3), (0, 1), (2, 3), (0, 2), (1, 3))


def test_topology_experts_are_spread_over_as_many_of_their_lanes_as_divide_both() -> None:
    """Eight ranks in copies of four lanes; experts that lie over two of them have four lanes, over all of them one."""

    def needed(ep: int, shard_lanes: int) -> list[tuple[int, ...]]:
        grid = Grid(name="language", ranks=range(8), dp=8, ep=ep)
        modules = [Module(grid=grid, trains=(True,), experts=True, shard_lanes=lanes) for lanes in (1, shard_lanes)]
        without, found = (needed_groups(ModuleGraph(modules=(module,), arrows=())) for module in modules)
        return [group for group in found if group not in without]

    # In twos: the other halves of the lanes are the expert groups that there are anyway.
    assert needed(2, 2) == [*((0, 2), (4, 6), (0, 4), (2, 6)), *((1, 3), (5, 7), (1, 5), (3, 7))]
    # In fours, of which experts have one lane and so nothing of their own.
    assert needed(8, 4) == [(0, 1, 2, 3), (4, 5, 6, 7), (0, 4), (1, 5), (2, 6), (3, 7)]


def test_topology_each_stage_has_groups_of_its_own_for_gradients_that_are_summed_beside_layers() -> None:
    """Of lanes that share a copy and of those that hold copies; nothing of what is frozen or summed at fixed places."""
    sums = frozenset[Overlap]({"sums"})
    vision = Module(grid=Grid(name="vision", ranks=range(4), dp=4), trains=(True,), shard_lanes=2, overlaps=sums)
    frozen = Module(grid=Grid(name="frozen", ranks=range(4), dp=4), trains=(False,), overlaps=sums)
    plain = Module(grid=Grid(name="plain", ranks=range(4), dp=4), trains=(True,))
    language = Module(
        grid=Grid(name="language", ranks=range(4), dp=2, pp=2), trains=(True,) * 4, chunks=2, overlaps=sums
    )
    arrows = tuple((name, "language") for name in ("vision", "frozen", "plain"))
    graph = ModuleGraph(modules=(vision, frozen, plain, language), arrows=arrows)
    found = gradient_groups(graph)
    assert [ranks for stage, ranks in found if stage.module == "vision"] == [(0, 1), (2, 3), (0, 2), (1, 3)]
    # Two chunks on each rank, whose sums different ranks may begin in different orders.
    assert [(stage.stage, ranks) for stage, ranks in found if stage.module == "language"] == [
        *((0, (0, 1)), (1, (2, 3))),
        *((2, (0, 1)), (3, (2, 3))),
    ]
    assert {stage.module for stage, _ in found} == {"vision", "language"}


def test_topology_gathers_at_any_time_have_groups_of_their_own() -> None:
    """The lanes over which copies are spread, and nothing of modules that gather at fixed places."""
    modules = [
        Module(grid=Grid(name=name, ranks=range(4), dp=4), trains=(True,), shard_lanes=lanes, overlaps=overlaps)
        for name, lanes, overlaps in (
            ("vision", 2, frozenset[Overlap]({"gathers"})),
            ("language", 0, frozenset[Overlap]({"sums"})),
        )
    ]
    graph = ModuleGraph(modules=tuple(modules), arrows=(("vision", "language"),))
    assert gather_groups(graph) == ((0, 1), (2, 3))
