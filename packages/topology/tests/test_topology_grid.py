"""Grids: coordinates and groups of both views, and refusals."""

from collections.abc import Sequence

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo.hooks import ConfigError
from mimo.topology import AXES, EXPERT_AXES, Coordinates, ExpertCoordinates, Grid


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    """Draw grids of up to 81 ranks with gaps, and any expert view of them."""
    sizes = {axis: draw(st.integers(1, 3)) for axis in AXES}
    stage = sizes["dp"] * sizes["cp"] * sizes["tp"]
    count = sizes["pp"] * stage
    ep = draw(st.sampled_from(divisors(stage)))
    etp = draw(st.sampled_from(divisors(stage // ep)))
    ranks = draw(st.sets(st.integers(0, 200), min_size=count, max_size=count))
    return Grid(name="m", ranks=sorted(ranks), **sizes, ep=ep, etp=etp)


def divisors(number: int) -> list[int]:
    """Return what divides a number."""
    return [one for one in range(1, number + 1) if number % one == 0]


def test_topology_tensor_axis_is_fastest() -> None:
    """Neighbouring ranks are tensor neighbours; pipeline stages are the coarsest cut."""
    grid = Grid(name="m", ranks=range(10, 18), pp=2, dp=2, tp=2)
    assert grid.coordinates(10) == Coordinates(pp=0, dp=0, cp=0, tp=0)
    assert grid.coordinates(11) == Coordinates(pp=0, dp=0, cp=0, tp=1)
    assert grid.coordinates(13) == Coordinates(pp=0, dp=1, cp=0, tp=1)
    assert grid.coordinates(16) == Coordinates(pp=1, dp=1, cp=0, tp=0)
    assert grid.groups(("tp",)) == ((10, 11), (12, 13), (14, 15), (16, 17))
    assert grid.groups(("dp",)) == ((10, 12), (11, 13), (14, 16), (15, 17))
    assert grid.stage_ranks(1) == (14, 15, 16, 17)


def test_topology_experts_see_the_same_ranks_otherwise() -> None:
    """Experts are spread over tensor and data ranks of a stage together; what ep and etp leave are copies, edp."""
    grid = Grid(name="m", ranks=range(10, 26), pp=2, dp=4, tp=2, ep=2, etp=2)
    assert (grid.edp, grid.expert_shape) == (2, (2, 2, 2, 2))
    assert grid.coordinates(15) == Coordinates(pp=0, dp=2, cp=0, tp=1)
    assert grid.expert_coordinates(15) == ExpertCoordinates(pp=0, edp=1, ep=0, etp=1)
    assert grid.groups(("etp",))[:2] == ((10, 11), (12, 13))
    assert grid.groups(("ep",))[:2] == ((10, 12), (11, 13))
    assert grid.groups(("ep", "etp")) == ((10, 11, 12, 13), (14, 15, 16, 17), (18, 19, 20, 21), (22, 23, 24, 25))
    assert grid.group_of(15, ("edp",)) == (11, 15)
    assert grid.group_of(15, ("ep",)) == (15, 17)


def test_topology_without_experts_the_views_differ_in_names_alone() -> None:
    """Expert sizes default to 1, and then every rank of a stage is a copy."""
    grid = Grid(name="m", ranks=range(12), dp=2, cp=3, tp=2)
    assert (grid.edp, grid.ep, grid.etp) == (12, 1, 1)
    assert grid.groups(("edp",)) == grid.groups(("dp", "cp", "tp"))


def test_topology_no_group_lies_along_axes_of_two_views() -> None:
    """A lane axis and an expert axis of one grid may cross, so that no ranks differ in these alone."""
    grid = Grid(name="m", ranks=range(4), dp=4, ep=2)
    with pytest.raises(AssertionError, match=r"no view of a grid has all of \['dp', 'ep'\]"):
        grid.groups(("dp", "ep"))
    with pytest.raises(AssertionError, match="no view"):
        grid.group_of(0, ("etp", "tp"))


def test_topology_a_rank_of_another_module_has_no_place() -> None:
    """Ranks in a gap or beyond the ends belong to nobody."""
    grid = Grid(name="m", ranks=[1, 4], dp=2)
    assert [rank for rank in range(6) if rank in grid] == [1, 4]
    for place in (grid.coordinates, grid.expert_coordinates):
        with pytest.raises(KeyError):
            place(2)


@given(grids(), st.one_of(st.sets(st.sampled_from(AXES)), st.sets(st.sampled_from(EXPERT_AXES))))
def test_topology_groups_partition_the_ranks(grid: Grid, axes: set[str]) -> None:
    """Groups along any axes of a view hold every rank once, ascending, and are what members call their own group."""
    groups = grid.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(grid.ranks)
    for group in groups:
        assert list(group) == sorted(group)
        assert {grid.group_of(rank, axes) for rank in group} == {group}


@given(grids(), st.one_of(st.sets(st.sampled_from(AXES)), st.sets(st.sampled_from(EXPERT_AXES))))
def test_topology_members_of_a_group_differ_along_its_axes_alone(grid: Grid, axes: set[str]) -> None:
    """Two ranks are in one group exactly if all their other coordinates, of that view, are the same."""
    view, place = (AXES, grid.coordinates) if axes <= set(AXES) else (EXPERT_AXES, grid.expert_coordinates)

    def others(rank: int) -> tuple[int, ...]:
        at = attrs.asdict(place(rank))
        return tuple(at[axis] for axis in view if axis not in axes)

    groups = grid.groups(axes)
    assert all(len({others(rank) for rank in group}) == 1 for group in groups)
    assert len({others(group[0]) for group in groups}) == len(groups)


@given(grids())
def test_topology_coordinates_and_ranks_are_inverse(grid: Grid) -> None:
    """`rank_at` undoes `coordinates`."""
    for rank in grid.ranks:
        place = grid.coordinates(rank)
        assert grid.rank_at(pp=place.pp, dp=place.dp, cp=place.cp, tp=place.tp) == rank


@pytest.mark.parametrize(
    ("ranks", "sizes", "text"),
    [
        ([], {}, r"modules\.m\.ranks: expected at least one rank, got none"),
        ([1, 0], {"dp": 2}, r"modules\.m\.ranks: expected distinct ranks from 0 in ascending order, got \[1, 0\]"),
        ([0, 0], {"dp": 2}, r"modules\.m\.ranks: .* got \[0, 0\]"),
        ([-1, 0], {"dp": 2}, r"modules\.m\.ranks: .* got \[-1, 0\]"),
        ([0, 1], {"tp": 0}, r"modules\.m\.tp: expected a size of 1 or more, got 0"),
        (
            [0, 1, 2],
            {"tp": 2},
            r"modules\.m: expected sizes that multiply to its 3 ranks, got pp 1 x dp 1 x cp 1 x tp 2 = 2\. Change",
        ),
        ([0, 1], {"dp": 2, "ep": 0}, r"modules\.m\.ep: expected a size of 1 or more, got 0"),
        ([0, 1], {"dp": 2, "etp": -1}, r"modules\.m\.etp: expected a size of 1 or more, got -1"),
        (
            range(6),
            {"dp": 3, "tp": 2, "ep": 4},
            r"modules\.m: expected ep x etp that divides the 6 ranks of a stage \(dp x cp x tp\), got ep 4 x etp 1 = 4",
        ),
        (
            range(8),  # they divide the ranks of the module, but not those of a stage
            {"pp": 2, "dp": 4, "ep": 4, "etp": 2},
            r"modules\.m: expected ep x etp that divides the 4 ranks of a stage .*, got ep 4 x etp 2 = 8\. Experts lie",
        ),
    ],
)
def test_topology_wrong_grids_are_refused_by_path(ranks: Sequence[int], sizes: dict[str, int], text: str) -> None:
    """Each wrong rank set or size is refused with its setting's path."""
    with pytest.raises(ConfigError, match=text):
        Grid(name="m", ranks=ranks, **sizes)
