"""Which of an encoder's rows lie on which rank: equal slices of a lane's rows, padded at the end."""

from __future__ import annotations

from mimo.topology import Coordinates
from mimo.trainer._resolved import JobModule


def held_rows(module: JobModule, place: Coordinates, total: int) -> tuple[range, int]:
    """Return which of the ``total`` rows of its lane a rank of an encoder holds, and of how many rows its tensor is.

    Context ranks hold equal slices of all rows, padding included, and under sequence parallelism tensor ranks equal
    slices of those; otherwise each tensor rank holds all that its context rank does.
    """
    grid = module.grid
    parts, part = (
        (grid.cp * grid.tp, place.cp * grid.tp + place.tp) if module.sequence_parallel else (grid.cp, place.cp)
    )
    each = -(-total // parts)
    return range(min(part * each, total), min((part + 1) * each, total)), each
