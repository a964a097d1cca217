"""Images that all get one size: CLIP's way, shrunk to cover it and cut, or SigLIP's, stretched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from mimo.hooks import ConfigError, must_be
from mimo.model import MAX_PIXELS, MAX_ROWS
from mimo_transformers.images.pictures import checked_canvas, checked_resize, mean_colour, middle, padded, resized
from mimo_transformers.images.processing import ImageProcessing, Size, all_pixels, count

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor


def _sides(*counts: int) -> Any:
    return must_be(
        f"{' or '.join(map(str, counts))} numbers from 1 to {MAX_PIXELS}",
        lambda value: len(value) in counts and all(1 <= one <= MAX_PIXELS for one in value),
    )


@attrs.frozen(kw_only=True)
class FixedImages(ImageProcessing):
    """Settings of images of one size, as of LLaVA 1.5, Gemma 3 and PaliGemma.

    Args:
        image_rows: of each image.
        resize: what its shorter side becomes, or its height and width.
        crop: height and width of what is cut out of its middle then; empty for all of it.
        pad: whether it is padded to a square first, with the mean colour.

    Raises:
        ConfigError: also if images would not all have one size.
    """

    kind: ClassVar[str] = "fixed"
    rows_key: ClassVar[str] = "image_rows"

    image_rows: int = count(MAX_ROWS)
    resize: tuple[int, ...] = attrs.field(validator=_sides(1, 2))
    crop: tuple[int, ...] = attrs.field(default=(), validator=_sides(0, 2))
    pad: bool = False

    def __attrs_post_init__(self) -> None:
        """Refuse images of many sizes."""
        if len(self.resize) == 1 and not (self.crop or self.pad):
            expected = "height and width, as only the shorter side of an image is resized"
            raise ConfigError("crop", expected=expected, got="none")

    def pattern(self, size: Size) -> tuple[str | int, ...]:
        """Return the number of rows."""
        self._becomes(size)
        return (self.image_rows,)

    def _becomes(self, size: Size) -> Size:
        """Return the size of an image once it is resized."""
        if self.pad:
            size = checked_canvas(size, (max(size), max(size)))
        if len(self.resize) != 1:
            return checked_resize(size, (self.resize[0], self.resize[1]))
        (short,), (height, width) = self.resize, size
        long = int(short * max(size) / min(size))
        return checked_resize(size, (short, long) if height < width else (long, short))

    def shape(self, size: Size) -> tuple[int, int, int]:
        """Return N, h and w of its pictures."""
        height, width = self.crop or self._becomes(size)
        return 1, height, width

    def _pictures(self, image: Image.Image) -> list[Image.Image]:
        becomes = self._becomes((image.height, image.width))
        if self.pad:
            longer = max(image.size)
            image = padded(image, (longer, longer), mean_colour(self.mean))
        image = resized(image, becomes, self.resample)
        return [middle(image, (self.crop[0], self.crop[1])) if self.crop else image]

    def collate(self, items: Sequence[Mapping[str, Tensor]], sizes: Sequence[Size]) -> dict[str, Any]:
        """Return ``pixel_values`` [B, 3, h, w] of B images."""
        del sizes
        return {"pixel_values": all_pixels(items)}
