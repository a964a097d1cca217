"""From a picture to numbers between -1 and 1, and back. Shapes: C channels, L patches of a picture, P patch side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mimo.model.runtime import picture_pixels, resized
from mimo_generator_flow._config import FlowConfig

if TYPE_CHECKING:
    from PIL import Image

_MODES = {1: "L", 3: "RGB"}
_HALF = 127.5
"""Of the range of a byte."""


def to_pixels(config: FlowConfig, image: Image.Image) -> Tensor:
    """Return a picture as [C, height, width], of the size that settings say.

    Raises:
        OSError: the picture can't be decoded.
    """
    mode = _MODES[config.channels]
    converted = image if image.mode == mode else image.convert(mode)  # which copies it in any case
    stretched = resized(converted, config.height, config.width, resample=config.resample)
    return picture_pixels([stretched], mean=(0.5,), std=(0.5,))[0]


def to_image(config: FlowConfig, patches: Tensor) -> Image.Image:
    """Return the picture of patches [L, P·P·C]; numbers beyond -1 and 1 are cut off."""
    from PIL import Image

    down, across = config.grid
    pixels = patches.view(down, across, config.patch, config.patch, config.channels).transpose(1, 2)
    values = pixels.float().clamp(-1, 1).add(1).mul(_HALF).round().to("cpu", torch.uint8).contiguous()
    data = bytearray(values.numel())
    torch.frombuffer(data, dtype=torch.uint8).copy_(values.flatten())
    return Image.frombytes(_MODES[config.channels], (config.width, config.height), bytes(data))


def save_image(image: Image.Image, path: Path) -> Path:
    """Write a picture to ``path`` with ``.png`` behind it, and return where it is."""
    target = path.with_name(f"{path.name}.png")
    image.save(target)
    return target
