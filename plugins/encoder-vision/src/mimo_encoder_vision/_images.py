"""From an image to numbers, and from many images of unlike sizes to packed patches with their places.

Shapes: C channels, P patch side, T patches of all images.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor


def to_pixels(image: Image.Image, *, grid: tuple[int, int], patch: int, channels: int) -> Tensor:
    """Return an image as [C, height, width] in -1 .. 1, resized to ``grid`` whole patches where it isn't.

    Raises:
        OSError: the image can't be decoded.
    """
    size = (grid[1] * patch, grid[0] * patch)  # PIL's order: width first
    converted = image.convert("L" if channels == 1 else "RGB")
    if converted.size != size:
        converted = converted.resize(size, Image.Resampling.BICUBIC)
    values = np.asarray(converted, dtype=np.float32).reshape(size[1], size[0], channels)
    return torch.from_numpy(np.ascontiguousarray(values.transpose(2, 0, 1)) / 127.5 - 1.0)


def touched_by(rows: range, lengths: Sequence[int]) -> tuple[slice, slice]:
    """Return which images packed ``rows`` touch, and which of the rows of those images they are.

    Args:
        rows: of all images one after the other; those beyond the end are none.
        lengths: rows of each image.
    """
    stops = list(accumulate(lengths))
    first, last = bisect_right(stops, rows.start), bisect_left(stops, rows.stop)
    offset = stops[first - 1] if first else 0
    return slice(first, last + 1), slice(rows.start - offset, rows.stop - offset)


def to_patches(pixels: Sequence[Tensor], *, patch: int, like: Tensor, width: int) -> Tensor:
    """Return images [C, height, width] cut into patches [T, C·P·P], row by row, one image after the other.

    Args:
        pixels: the images; none is fine.
        patch: P.
        like: gives device and dtype.
        width: C·P·P, for when there is no image to tell.
    """
    pieces = [
        image.unfold(1, patch, patch).unfold(2, patch, patch).permute(1, 2, 0, 3, 4).reshape(-1, width)
        for image in pixels
    ]
    return torch.cat(pieces).to(like) if pieces else like.new_empty(0, width)


def sine_positions(grids: Sequence[tuple[int, int]], *, width: int, like: Tensor) -> Tensor:
    """Return the 2-D sine-cosine positions [T, width] of all patches of grids (down, across).

    Half of the columns tell the row and half the column, each as sines and cosines (He et al. 2021, arXiv:2111.06377,
    section 3, after Vaswani et al. 2017, section 3.5). No parameter, so any size will do.
    """
    places: dict[tuple[int, int], Any] = {
        (down, across): torch.cartesian_prod(torch.arange(down), torch.arange(across)).view(-1, 2)
        for down, across in set(grids)
    }
    if not grids:
        return like.new_empty(0, width)
    place = torch.cat([places[grid] for grid in grids]).to(like.device, torch.float32)  # [T, 2]
    frequencies = 10000.0 ** -(torch.arange(width // 4, dtype=torch.float32, device=like.device) / (width // 4))
    angles = place.unsqueeze(2) * frequencies  # [T, 2, width / 4]
    return torch.cat((angles.sin(), angles.cos()), 2).flatten(1).to(like)
