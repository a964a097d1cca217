"""Pictures as Pillow has them: in colour, resized, cut and padded, none larger than can be worked with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

COLOURS = 3
MAX_CANVAS = 1 << 27
"""Pixels of a picture on the way: half a GiB, twice what the largest image that data may hold has."""
RESAMPLES: Mapping[str, int] = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}
"""Pillow's numbers of its filters, which published folders have."""
_BYTE = 255
_WIDE = ("I", "F")
"""How modes begin whose pixels aren't bytes."""


def checked_canvas(size: Sequence[int], becomes: tuple[int, int]) -> tuple[int, int]:
    """Return a size, (height, width), that an image of another is to have on the way.

    Raises:
        ValueError: it has no pixel, or more than `MAX_CANVAS`.
    """
    height, width = becomes
    if height < 1 or width < 1:
        raise ValueError(f"{_shown(size)} becomes {height} x {width}, which has no pixel")
    if height * width > MAX_CANVAS:
        raise ValueError(f"{_shown(size)} becomes {height} x {width}, more than {MAX_CANVAS:,} pixels in all")
    return height, width


def checked_resize(size: Sequence[int], becomes: tuple[int, int]) -> tuple[int, int]:
    """Return a size that an image of another is resized to; its columns come first, while it is as high as before.

    Raises:
        ValueError: as `checked_canvas`, of either step.
    """
    checked_canvas(size, (size[0], becomes[1]))
    return checked_canvas(size, becomes)


def _shown(size: Sequence[int]) -> str:
    return f"an image of {size[0]} x {size[1]} pixels (height x width)"


def in_colour(image: Image.Image) -> Image.Image:
    """Return an image in colour, what is transparent on white.

    Raises:
        ValueError: its pixels aren't bytes, so that white is unknown.
    """
    if image.mode.startswith(_WIDE):
        msg = f"an image of Pillow's mode {image.mode!r}, whose white is not known: save it in 8 bits"
        raise ValueError(msg)
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    from PIL import Image as Pillow

    clear = image.convert("RGBA")
    white = Pillow.new("RGBA", clear.size, (255, 255, 255, 255))
    return Pillow.alpha_composite(white, clear).convert("RGB")


def resized(image: Image.Image, size: tuple[int, int], resample: str) -> Image.Image:
    """Return a picture at a size, (height, width)."""
    height, width = checked_resize((image.height, image.width), size)
    return image.resize((width, height), RESAMPLES[resample])


def middle(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Return the middle of a picture, (height, width); black where it has less."""
    height, width = size
    top, left = (image.height - height) // 2, (image.width - width) // 2
    return image.crop((left, top, left + width, top + height))


def padded(image: Image.Image, size: tuple[int, int], colour: tuple[int, ...] = (0, 0, 0)) -> Image.Image:
    """Return a picture in the middle of a larger one of one colour, (height, width)."""
    from PIL import Image as Pillow

    height, width = checked_canvas((image.height, image.width), size)
    canvas = Pillow.new("RGB", (width, height), colour)
    canvas.paste(image, ((width - image.width) // 2, (height - image.height) // 2))
    return canvas


def mean_colour(mean: Sequence[float]) -> tuple[int, ...]:
    """Return the bytes of a mean colour of 0 to 1."""
    return tuple(int(one * _BYTE) for one in mean)


def tiles(image: Image.Image, size: tuple[int, int]) -> list[Image.Image]:
    """Return a picture cut into tiles, (height, width), row by row."""
    height, width = size
    corners = ((left, top) for top in range(0, image.height, height) for left in range(0, image.width, width))
    return [image.crop((left, top, left + width, top + height)) for left, top in corners]
