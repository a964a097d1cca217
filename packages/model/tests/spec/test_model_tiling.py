"""Into which tiles an image is cut."""

from __future__ import annotations

import pytest

from mimo.model import best_tiling


@pytest.mark.parametrize(
    ("size", "most", "tiles"),
    [
        ((8, 8), 6, (1, 1)),
        ((100, 100), 6, (2, 2)),  # as near as one, and the image fills more than half of four
        ((15, 15), 4, (2, 2)),
        ((11, 11), 4, (1, 1)),
        ((16, 24), 6, (2, 3)),
        ((30, 5), 6, (6, 1)),
        ((5, 30), 4, (1, 4)),
        ((20000, 1), 12, (12, 1)),
    ],
)
def test_tiles_are_those_nearest_to_the_image(size: tuple[int, int], most: int, tiles: tuple[int, int]) -> None:
    """In shape first, then in size: of equally near ones the largest that the image has more than half of."""
    assert best_tiling(size, side=8, most=most) == tiles
