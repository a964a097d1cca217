"""Grids: coordinates, groups and refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo.hooks import ConfigError
from mimo.topology import AXES, Coordinates, Grid


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    """Draw grids of up to 48 ranks with gaps."""
    sizes = {axis: draw(st.integers(1, 3)) for axis in AXES}
    count = sizes["pp"] * sizes["dp"] * sizes["cp"] * sizes["tp"]
    ranks = draw(st.sets(st.integers(0, 200), min_size=count, max_size=count))
    return Grid(name="m", ranks=sorted(ranks), **sizes)


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


@given(grids(), st.sets(st.sampled_from(AXES)))
def test_topology_groups_partition_the_ranks(grid: Grid, axes: set[str]) -> None:
    """Groups along any axes hold every rank once, ascending, and are what each member calls its own group."""
    groups = grid.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(grid.ranks)
    for group in groups:
        assert list(group) == sorted(group)
        assert {grid.group_of(rank, axes) for rank in group} == {group}


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
    ],
)
def test_topology_wrong_grids_are_refused_by_path(ranks: list[int], sizes: dict[str, int], text: str) -> None:
    """Each wrong rank set or size is refused with its setting's path."""
    with pytest.raises(ConfigError, match=text):
        Grid(name="m", ranks=ranks, **sizes)
