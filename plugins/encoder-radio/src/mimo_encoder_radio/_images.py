"""From an image to normed pixels. Shapes: n images of one size, C channels."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mimo.model import best_tiling
from mimo_encoder_radio._config import RadioConfig
from mimo_encoder_radio._grids import native_grid


def to_pixels(config: RadioConfig, image: Image.Image) -> Tensor:
    """Return what the encoder sees of an image: [n, C, height, width], one at its own size or one of each tile.

    Tiles come row by row, the thumbnail last.

    Raises:
        OSError: the image can't be decoded.
    """
    mode = "L" if config.channels == 1 else "RGB"
    converted = image if image.mode == mode else image.convert(mode)
    size = (converted.height, converted.width)
    if config.mode == "native":
        down, across = native_grid(config, size)
        pixels = _resized(converted, (down * config.patch, across * config.patch))[None]
    else:
        tile = config.size
        down, across = best_tiling(size, side=tile, most=config.max_tiles)
        whole = _resized(converted, (down * tile, across * tile))
        tiles = whole.reshape(-1, down, tile, across, tile).transpose(1, 3, 0, 2, 4)
        pixels = tiles.reshape(down * across, -1, tile, tile)
        if config.thumbnail and len(pixels) > 1:
            pixels = np.concatenate([pixels, _resized(converted, (tile, tile))[None]])
    mean, std = (np.asarray(values, dtype=np.float32)[:, None, None] for values in (config.mean, config.std))
    return torch.from_numpy(np.ascontiguousarray((pixels / np.float32(255) - mean) / std))


def _resized(image: Image.Image, size: tuple[int, int]) -> np.ndarray:
    """Return an image as [C, *size] in 0 .. 255, where resizing, which is done in float32, may leave that a little."""
    if (image.height, image.width) == size:
        values = np.asarray(image, dtype=np.float32)
        return values.reshape(*size, -1).transpose(2, 0, 1)
    wide = (size[1], size[0])  # PIL's order
    bands = [band.convert("F").resize(wide, Image.Resampling.BICUBIC) for band in image.split()]
    return np.stack([np.asarray(band) for band in bands])
