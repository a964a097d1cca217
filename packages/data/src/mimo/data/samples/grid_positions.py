"""Where rows lie in time, down and across, for language models that turn by these: known from sizes alone.

As in Qwen2-VL (Wang et al. 2024, arXiv:2409.12191, section 2.1). S tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Grid: TypeAlias = tuple[int, int, int]
"""Frames of an item, and how many rows each has down and across; the rows follow one another in this order."""
_GRIDS = 64
"""Of which it is remembered where their rows lie."""


@lru_cache(_GRIDS)
def _places(grid: Grid) -> NDArray[np.int64]:
    """Return the places ``[R, 3]`` of the rows of a grid in it, which nobody may write to."""
    places = np.indices(grid).reshape(3, -1).T
    places.flags.writeable = False
    return places


def grid_positions(length: int, items: Sequence[tuple[int, Grid]]) -> NDArray[np.int64]:
    """Return the places ``[S, 3]`` of a sample's rows.

    A row of text has one number on all axes, one more than the row before. The rows of a grid count its frames, rows
    down and columns from the number that text would have there; what follows continues from their largest number + 1.

    Args:
        length: S.
        items: row at which each grid begins, and the grid; ascending. Rows in none of them count as text.
    """
    found = np.empty((length, 3), dtype=np.int64)
    row = number = 0
    for start, grid in items:
        found[row:start] = np.arange(number, number + start - row)[:, None]
        number += start - row
        places = _places(grid)
        row = start + len(places)
        found[start:row] = number + places
        number += max(grid) if len(places) else 0
    found[row:] = np.arange(number, number + length - row)[:, None]
    return found
