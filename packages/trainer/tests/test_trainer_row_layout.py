"""What a rank of an encoder holds must be what the routes take it to hold."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from mimo.topology import Grid
from mimo.trainer._row_layout import encoder_cut, held_rows


@pytest.mark.parametrize("total", [0, 1, 5, 12, 13])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (3, 1), (1, 2), (2, 3)])
def test_slices_of_an_encoder_are_cut_as_they_are_held(cp: int, tp: int, sequence_parallel: bool, total: int) -> None:
    """Equal slices over context ranks, and over tensor ranks if these hold slices; the last may have fewer or none."""
    grid = Grid(name="vision", ranks=range(2 * cp * tp), dp=2, cp=cp, tp=tp)
    module: Any = SimpleNamespace(grid=grid, sequence_parallel=sequence_parallel)
    cut = encoder_cut(module, total)
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
