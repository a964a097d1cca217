"""From the size of an image to the grids of patches that the encoder sees; in whole numbers only, free of torch.

So every rank on any machine finds the same rows. An image is one grid near its own size, or tiles of one size.
"""

from __future__ import annotations

import math

from mimo.model import best_tiling
from mimo_encoder_radio._config import RadioConfig

Grid = tuple[int, int]
"""How many down and across."""


def grids_of(config: RadioConfig, size: tuple[int, ...]) -> list[Grid]:
    """Return the grids of patches, all of one size, that an image of ``size`` = (height, width) pixels becomes."""
    if config.mode == "native":
        return [native_grid(config, size)]
    side = config.size // config.patch
    tiles = math.prod(best_tiling(size, side=config.size, most=config.max_tiles))
    return [(side, side)] * (tiles + (config.thumbnail and tiles > 1))


def native_grid(config: RadioConfig, size: tuple[int, ...]) -> Grid:
    """Return the grid of an image at its own size: whole patches, as many as are allowed, sides that can be shuffled.

    As the image processor of Nemotron 3 Nano Omni does, which rounds each side up, then brings the area within bounds,
    then each side to a multiple, up where the bounds let it.
    """
    height, width = size
    most, least, multiple = config.max_patches, config.min_patches, config.projector.shuffle
    down, across = -(-height // config.patch), -(-width // config.patch)
    if down * across > most:
        down, across = max(1, math.isqrt(most * down // across)), max(1, math.isqrt(most * across // down))
    elif down * across < least:
        down, across = _root(least * down, across), _root(least * across, down)
    down = _rounded(down, multiple, most // min(across, most))
    across = _rounded(across, multiple, most // down)
    if down * across > most:  # a strip, whose short side was less than a multiple
        down = most // across // multiple * multiple
    return down, across


def _root(numerator: int, denominator: int) -> int:
    """Return the square root of a fraction above 0, rounded up."""
    return math.isqrt(-(-numerator // denominator) - 1) + 1


def _rounded(side: int, multiple: int, most: int) -> int:
    """Return a multiple, at least one: the next one up if it is not above ``most``, or else the next one down."""
    up = -(-side // multiple) * multiple
    return up if up <= most else max(multiple, min(side, most) // multiple * multiple)
