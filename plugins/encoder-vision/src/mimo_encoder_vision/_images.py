"""From an image to numbers. Shapes: N tiles of an image, C channels."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mimo_encoder_vision._config import VisionConfig
from mimo_encoder_vision._grids import native_grid, tiles_of

_ASPECT = 16


def to_pixels(config: VisionConfig, image: Image.Image) -> Tensor:
    """Return an image as [N, C, height, width]: of the size that it gets, its numbers scaled as settings say.

    Raises:
        OSError: the image can't be decoded.
    """
    converted = image.convert("L" if config.channels == 1 else "RGB")
    if config.mode == "native":
        down, across = native_grid(config, (image.height, image.width))
        tiles = [_resized(config, converted, down * config.patch, across * config.patch)]
    elif config.mode == "fixed":
        tiles = [_covering(config, converted) if config.crop else _resized(config, converted, config.size, config.size)]
    else:
        tiles = _tiles(config, converted)
    values = np.stack([np.asarray(tile, dtype=np.float32).reshape(tile.height, tile.width, -1) for tile in tiles])
    mean, std = (np.asarray(each, dtype=np.float32) for each in (config.mean, config.std))
    scaled = (values * np.float32(1 / 255) - mean) / std
    return torch.from_numpy(np.ascontiguousarray(scaled.transpose(0, 3, 1, 2)))


def _resized(config: VisionConfig, image: Image.Image, height: int, width: int) -> Image.Image:
    size = (width, height)  # Pillow's order
    return image if image.size == size else image.resize(size, Image.Resampling[config.resample.upper()])


def _covering(config: VisionConfig, image: Image.Image) -> Image.Image:
    """Return the middle of an image whose shorter side has become that of the square."""
    side, shorter = config.size, min(image.size)
    if max(image.size) > _ASPECT * shorter:  # or a line of pixels would become as large as memory
        width, height = (min(each, _ASPECT * shorter) for each in image.size)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        image = image.crop((left, top, left + width, top + height))
    scaled = _resized(config, image, side * image.height // shorter, side * image.width // shorter)
    left, top = (scaled.width - side) // 2, (scaled.height - side) // 2
    return scaled.crop((left, top, left + side, top + side))


def _tiles(config: VisionConfig, image: Image.Image) -> list[Image.Image]:
    side = config.size
    down, across = tiles_of(config, (image.height, image.width))
    whole = _resized(config, image, down * side, across * side)
    corners = [(x * side, y * side) for y in range(down) for x in range(across)]
    tiles = [whole.crop((left, top, left + side, top + side)) for left, top in corners]
    return [*tiles, _resized(config, image, side, side)] if config.thumbnail and len(tiles) > 1 else tiles
