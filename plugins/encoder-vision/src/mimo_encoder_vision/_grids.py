"""How many patches an image becomes, from its header's size alone. Free of torch.

Each rank on any machine must find the same: whole numbers and exact fractions, but for `_enlarged`, whose few
operations are rounded the same way everywhere.
"""

from __future__ import annotations

import math

from mimo.model import best_tiling, projected_grid, projected_rows
from mimo_encoder_vision._config import VisionConfig

_STEP = 1e-5


def grids_of(config: VisionConfig, size: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return how many patches each tile of an image of ``size`` = (height, width) pixels has down and across.

    An image without tiles counts as one.
    """
    if config.mode == "native":
        return [native_grid(config, size)]
    down, across = tiles_of(config, size) if config.mode == "tiles" else (1, 1)
    tiles = down * across + (1 if config.thumbnail and down * across > 1 else 0)
    return [(config.side, config.side)] * tiles


def rows_of(config: VisionConfig, size: tuple[int, ...]) -> int:
    """Return the rows that an image becomes."""
    return sum(
        projected_rows(config.projector, grid, class_tokens=config.class_rows) for grid in grids_of(config, size)
    )


def row_grid_of(config: VisionConfig, size: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Return the tiles of an image, and the rows down and across of each; None where rows lie in no grid."""
    return projected_grid(config.projector, grids_of(config, size), class_tokens=config.class_rows)


def packed_rows_of(config: VisionConfig, size: tuple[int, ...]) -> int:
    """Return the rows that an image has inside the encoder."""
    return sum(config.class_tokens + down * across for down, across in grids_of(config, size))


def native_grid(config: VisionConfig, size: tuple[int, ...]) -> tuple[int, int]:
    """Return how many patches an image has down and across where it keeps its size.

    Sides are rounded to whole cells, the squares of patches that the projector joins.
    """
    shuffle = config.projector.shuffle
    cell, most = config.patch * shuffle, config.max_patches // shuffle**2
    height, width = size
    if config.enlarge:
        down, across = _enlarged(height, width, cell, most)
        return down * shuffle, across * shuffle
    down, across = (max(1, (side + cell // 2) // cell) for side in (height, width))
    if down * across > most:
        down = min(most, max(1, math.isqrt(most * height // width)))
        across = min(most // down, max(1, math.isqrt(most * width // height)))
    return down * shuffle, across * shuffle


def _enlarged(height: int, width: int, cell: int, most: int) -> tuple[int, int]:
    """Return the cells down and across of an image scaled until they are nearly ``most``.

    The search is that of NaFlex (Tschannen et al. 2025, arXiv:2502.14786, section 2.4.2, as Siglip2ImageProcessor does
    it), with its limits of scale.
    """

    def cells(scale: float, side: int) -> int:
        return max(1, math.ceil(side * scale / cell))

    low, high = _STEP / 10, 100.0
    while high - low >= _STEP:
        scale = (low + high) / 2
        if cells(scale, height) * cells(scale, width) <= most:
            low = scale
        else:
            high = scale
    return cells(low, height), cells(low, width)


def tiles_of(config: VisionConfig, size: tuple[int, ...]) -> tuple[int, int]:
    """Return how many tiles an image has down and across."""
    return best_tiling(size, side=config.size, most=config.max_tiles)
