"""From pictures to numbers. Shapes: N pictures of one size, C channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal, Protocol, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

Resample: TypeAlias = Literal["bicubic", "bilinear"]
_PILLOWS: Mapping[Resample, int] = {"bilinear": 2, "bicubic": 3}
"""Its numbers of them."""
_ASPECT = 16
_RANGE = 255


class Picture(Protocol):
    """What is asked of a ``PIL.Image.Image``."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""

    @property
    def width(self) -> int:
        """In pixels."""

    @property
    def height(self) -> int:
        """In pixels."""

    def resize(self, size: tuple[int, int], resample: int, /) -> Self:
        """Return it at another size."""

    def crop(self, box: tuple[int, int, int, int], /) -> Self:
        """Return a part of it."""

    def tobytes(self) -> bytes:
        """Return its pixels row by row, their channels one after the other."""


PictureT = TypeVar("PictureT", bound=Picture)


def resized(image: PictureT, height: int, width: int, *, resample: Resample) -> PictureT:
    """Return a picture at a size in pixels, itself if it has that."""
    size = (width, height)  # Pillow's order
    return image if image.size == size else image.resize(size, _PILLOWS[resample])


def covering(image: PictureT, side: int, *, resample: Resample) -> PictureT:
    """Return the middle square of a picture whose shorter side has become ``side`` pixels."""
    shorter = min(image.size)
    if max(image.size) > _ASPECT * shorter:  # or a line of pixels would become as large as memory
        width, height = (min(each, _ASPECT * shorter) for each in image.size)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        image = image.crop((left, top, left + width, top + height))
    scaled = resized(image, side * image.height // shorter, side * image.width // shorter, resample=resample)
    left, top = (scaled.width - side) // 2, (scaled.height - side) // 2
    return scaled.crop((left, top, left + side, top + side))


def picture_pixels(images: Sequence[Picture], *, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return pictures of one size as [N, C, height, width]: 0 to 1, then less ``mean`` and over ``std``.

    Args:
        images: at least one, grey or in colour.
        mean: one number, or one for each channel.
        std: likewise.
    """
    height, width = images[0].height, images[0].width
    bands = [torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8) for image in images]
    pixels = torch.stack([band.view(height, width, -1) for band in bands]).permute(0, 3, 1, 2)
    low, scale = (_of_channels(tuple(values)) for values in (mean, std))
    numbers = pixels.to(torch.float32, memory_format=torch.contiguous_format)  # and of this size no more memory
    return numbers.mul_(1 / _RANGE).sub_(low).div_(scale)


@lru_cache(64)
def _of_channels(values: tuple[float, ...]) -> Tensor:
    """Return a number of each channel, or one for all, [C, 1, 1], to which nobody may write."""
    return torch.tensor(values).view(-1, 1, 1)
