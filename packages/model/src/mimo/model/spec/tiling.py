"""Into which tiles of one size an image is cut. Free of torch, and exact: every rank on any machine finds the same."""

from __future__ import annotations

import math
from fractions import Fraction


def best_tiling(size: tuple[int, ...], *, side: int, most: int) -> tuple[int, int]:
    """Return how many tiles an image has down and across: those whose aspect is nearest to its own.

    Of grids that are equally near the larger one is taken, unless the image has at most half as many pixels as it
    (Chen et al. 2024, arXiv:2404.16821, section 3.1, as InternVL does it).

    Args:
        size: height and width in pixels.
        side: of a tile in pixels.
        most: tiles at most.
    """
    height, width = size
    grids = [(down, across) for across in range(1, most + 1) for down in range(1, most // across + 1)]
    best, nearest = (1, 1), abs(Fraction(width, height) - 1)
    for down, across in sorted(grids, key=math.prod)[1:]:
        difference = abs(Fraction(width, height) - Fraction(across, down))
        enough = 2 * height * width > side**2 * down * across
        if difference < nearest or (difference == nearest and enough):
            best, nearest = (down, across), difference
    return best
