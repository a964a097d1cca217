"""Which of an encoder's rows lie on which rank: equal slices of a lane's rows of a pass, padded at the end.

A pass has the rows of its microbatches one after the other, so what a rank holds of one of them is an interval.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mimo.schedule import Cut
from mimo.topology import Coordinates
from mimo.trainer.job.job import JobModule


def held_rows(module: JobModule, place: Coordinates, total: int) -> tuple[range, int]:
    """Return which of the ``total`` rows of its lane a rank of an encoder holds, and of how many rows its tensor is.

    Context ranks hold equal slices of all rows, padding included, and under sequence parallelism tensor ranks equal
    slices of those; otherwise each tensor rank holds all that its context rank does.
    """
    part, each = _part(module, place), _each(module, total)
    return range(min(part * each, total), min((part + 1) * each, total)), each


def held_part(module: JobModule, place: Coordinates, rows: Sequence[int], index: int) -> int:
    """Return how many rows of a rank's tensor are those of one microbatch.

    The padding is the last microbatch's, so that all together are the tensor.

    Args:
        module: the encoder.
        place: where the rank stands in its grid.
        rows: of each microbatch of the pass, of the rank's lane.
        index: which of them.
    """
    part, each = _part(module, place), _each(module, sum(rows))
    first, stop = sum(rows[:index]), sum(rows[: index + 1])
    if index == len(rows) - 1:
        stop = _parts(module) * each
    return max(min(stop, (part + 1) * each) - max(first, part * each), 0)


def encoder_cut(module: JobModule, rows: Sequence[int], index: int = 0) -> Cut:
    """Return how one microbatch's rows of a lane are cut over all ranks of it, padding left out.

    Args:
        module: the encoder.
        rows: of each microbatch of the pass, of the lane.
        index: which of them.
    """
    each, first = _each(module, sum(rows)), sum(rows[:index])
    parts = _parts(module)
    return Cut([min(max(part * each - first, 0), rows[index]) for part in range(parts + 1)], range(parts))


def chosen(cut: Cut, rows: NDArray[np.bool_]) -> Cut:
    """Return how some of the rows of a cut lie, of each of which ``rows`` says whether it is one."""
    before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(rows)])
    return Cut(before[list(cut.bounds)].tolist(), cut.cells)


def is_sliced(module: JobModule) -> bool:
    """Tell whether the ranks of a lane hold slices of its rows, so that those of a whole pass decide who holds what."""
    return _parts(module) > 1


def _parts(module: JobModule) -> int:
    return module.grid.cp * module.slices


def _part(module: JobModule, place: Coordinates) -> int:
    return place.cp * module.slices + place.tp % module.slices


def _each(module: JobModule, total: int) -> int:
    return -(-total // _parts(module))
