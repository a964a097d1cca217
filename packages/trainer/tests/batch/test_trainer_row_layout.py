"""What a rank of an encoder holds must be what the routes take it to hold."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from mimo.topology import Grid
from mimo.trainer.batch.row_layout import encoder_cut, held_part, held_rows


@pytest.mark.parametrize("total", [0, 1, 5, 12, 13])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (3, 1), (1, 2), (2, 3)])
def test_slices_of_an_encoder_are_cut_as_they_are_held(cp: int, tp: int, sequence_parallel: bool, total: int) -> None:
    """Equal slices over context ranks, and over tensor ranks if these hold slices; the last may have fewer or none."""
    grid = Grid(name="vision", ranks=range(2 * cp * tp), dp=2, cp=cp, tp=tp)
    module: Any = SimpleNamespace(grid=grid, slices=tp if sequence_parallel else 1)
    cut = encoder_cut(module, [total])
    assert cut.bounds[-1] == total
    for rank in grid.ranks:
        place = grid.coordinates(rank)
        cell = place.cp * tp + place.tp if sequence_parallel else place.cp
        held, room = held_rows(module, place, total)
        assert [(held.start, held.stop)] == [
            span for span, holder in zip(pairwise(cut.bounds), cut.cells, strict=True) if holder == cell
        ]
        assert len(held) <= room
        assert room * cp * (tp if sequence_parallel else 1) >= total
        assert held_part(module, place, [total], 0) == room


@pytest.mark.parametrize("rows", [(0, 0), (5,), (4, 0, 3), (0, 7, 0), (1, 1, 11), (13, 2)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (3, 1), (2, 3)])
def test_microbatches_of_a_pass_are_intervals_of_its_slices(
    cp: int, tp: int, sequence_parallel: bool, rows: tuple[int, ...]
) -> None:
    """What ranks hold of each microbatch are together the slices of the pass; padding at its end is the last one's."""
    grid = Grid(name="vision", ranks=range(cp * tp), cp=cp, tp=tp)
    module: Any = SimpleNamespace(grid=grid, slices=tp if sequence_parallel else 1)
    cuts = [encoder_cut(module, rows, index) for index in range(len(rows))]
    assert [cut.bounds[-1] for cut in cuts] == list(rows)
    for rank in grid.ranks:
        place = grid.coordinates(rank)
        cell = place.cp * tp + place.tp if sequence_parallel else place.cp
        held, room = held_rows(module, place, sum(rows))
        found = [
            sum(rows[:index]) + row
            for index, cut in enumerate(cuts)
            for row in range(cut.bounds[cell], cut.bounds[cell + 1])
        ]
        assert found == list(held)
        parts = [held_part(module, place, rows, index) for index in range(len(rows))]
        assert sum(parts) == room
        assert parts[:-1] == [cut.bounds[cell + 1] - cut.bounds[cell] for cut in cuts[:-1]]
