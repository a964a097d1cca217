"""Where patches lie, as rows that are added to theirs.

Shapes: T patches of all grids, W width of a row, S side of the learned table in patches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from mimo.model.runtime import to_device


def sine_positions(grid: tuple[int, int], *, width: int, like: Tensor) -> Tensor:
    """Return the 2-D sine-cosine positions [T, W] of the patches of a grid (down, across).

    Half of the columns encode the row and half the column, each as sines and cosines (He et al. 2021, arXiv:2111.06377,
    section 3, after Vaswani et al. 2017, section 3.5). No parameter, so any size will do.
    """
    down, across = grid
    place = torch.cartesian_prod(torch.arange(down), torch.arange(across)).view(-1, 2)
    wide = torch.promote_types(like.dtype, torch.float32)
    place = to_device(place, like.device, wide)  # [T, 2]
    frequencies = 10000.0 ** -(torch.arange(width // 4, dtype=wide, device=like.device) / (width // 4))
    angles = place.unsqueeze(2) * frequencies  # [T, 2, W / 4]
    return torch.cat((angles.sin(), angles.cos()), 2).flatten(1).to(like)


def resized_positions(table: Tensor, grid: tuple[int, int], *, antialias: bool) -> Tensor:
    """Return a learned table of positions [S·S, W] as [T, W] of a grid (down, across).

    Args:
        table: of a square of patches, row by row.
        grid: for which.
        antialias: bilinear, and with a wider filter where the grid is smaller (SigLIP 2, NaFlex); otherwise bicubic
            (Dosovitskiy et al. 2020, section 3.2).
    """
    side = round(len(table) ** 0.5)
    if grid == (side, side):
        return table
    wide = table.to(torch.promote_types(table.dtype, torch.float32))
    down, across = (to_device(_shares(count, side, antialias=antialias), wide.device, wide.dtype) for count in grid)
    rows = (down @ wide.view(side, -1)).view(grid[0], side, -1)  # [down, S, W]
    return (across @ rows).flatten(0, 1).to(table.dtype)


def _shares(count: int, side: int, *, antialias: bool) -> Tensor:
    """Return how much each of ``count`` rows has of each of ``side``, [count, S]: `interpolate` of each row alone.

    Both filters are products of one for rows and one for columns. As products with these the resizing has a gradient
    that is the same in each run, on CUDA too.
    """
    alone = torch.eye(side).view(1, 1, side, side)
    mode = "bilinear" if antialias else "bicubic"
    return functional.interpolate(alone, (count, side), mode=mode, align_corners=False, antialias=antialias)[0, 0]


def each_once(grids: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the different grids, in the order in which they come."""
    return list(dict.fromkeys(grids))
