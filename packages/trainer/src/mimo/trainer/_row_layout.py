"""Which of an encoder's rows lie on which rank: equal slices of a lane's rows, padded at the end."""

from __future__ import annotations

from mimo.schedule import Cut
from mimo.topology import Coordinates
from mimo.trainer._resolved import JobModule


def held_rows(module: JobModule, place: Coordinates, total: int) -> tuple[range, int]:
    """Return which of the ``total`` rows of its lane a rank of an encoder holds, and of how many rows its tensor is.

    Context ranks hold equal slices of all rows, padding included, and under sequence parallelism tensor ranks equal
    slices of those; otherwise each tensor rank holds all that its context rank does.
    """
    parts = _parts(module)
    part = place.cp * module.grid.tp + place.tp if module.sequence_parallel else place.cp
    each = -(-total // parts)
    return range(min(part * each, total), min((part + 1) * each, total)), each


def encoder_cut(module: JobModule, total: int) -> Cut:
    """Return the same of all ranks of a lane: how its ``total`` rows are cut over them."""
    parts = _parts(module)
    return Cut.contiguous(total, each=-(-total // parts), cells=parts)


def _parts(module: JobModule) -> int:
    return module.grid.cp * (module.grid.tp if module.sequence_parallel else 1)
