"""From an image to numbers. Shapes: N tiles of an image, C channels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from mimo.model.runtime import covering, picture_pixels, resized
from mimo_encoder_vision._config import VisionConfig
from mimo_encoder_vision._grids import native_grid, tiles_of

if TYPE_CHECKING:
    from PIL import Image


def to_pixels(config: VisionConfig, image: Image.Image) -> Tensor:
    """Return an image as [N, C, height, width]: of the size that it gets, its numbers scaled as settings say.

    Raises:
        OSError: the image can't be decoded.
    """
    mode = "L" if config.channels == 1 else "RGB"
    converted = image if image.mode == mode else image.convert(mode)  # which copies it in any case
    if config.mode == "native":
        down, across = native_grid(config, (image.height, image.width))
        tiles = [_resized(config, converted, down * config.patch, across * config.patch)]
    elif config.mode == "tiles":
        tiles = _tiles(config, converted)
    elif config.crop:
        tiles = [covering(converted, config.size, resample=config.resample)]
    else:
        tiles = [_resized(config, converted, config.size, config.size)]
    return picture_pixels(tiles, mean=config.mean, std=config.std)


def _resized(config: VisionConfig, image: Image.Image, height: int, width: int) -> Image.Image:
    return resized(image, height, width, resample=config.resample)


def _tiles(config: VisionConfig, image: Image.Image) -> list[Image.Image]:
    side = config.size
    down, across = tiles_of(config, (image.height, image.width))
    whole = _resized(config, image, down * side, across * side)
    corners = [(x * side, y * side) for y in range(down) for x in range(across)]
    tiles = [whole.crop((left, top, left + side, top + side)) for left, top in corners]
    return [*tiles, _resized(config, image, side, side)] if config.thumbnail and len(tiles) > 1 else tiles
