"""Images fitted into a square of one size, the rest of which has the mean colour: DeepSeek-VL.

After Lu et al. 2024, arXiv:2403.05525, section 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from mimo.hooks import ConfigError
from mimo.model import MAX_PIXELS, MAX_ROWS
from mimo_transformers.images.pictures import checked_resize, mean_colour, padded, resized
from mimo_transformers.images.processing import ImageProcessing, Size, all_pixels, count

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor


@attrs.frozen(kw_only=True)
class FittedImages(ImageProcessing):
    """Settings of images fitted into a square, as of DeepSeek-VL.

    Args:
        image_rows: of each image.
        side: of the square, which the longer side of an image becomes.
        least: what the shorter one becomes at least.

    Raises:
        ConfigError: also if the shorter side would be longer than the square.
    """

    kind: ClassVar[str] = "fitted"

    image_rows: int = count(MAX_ROWS)
    side: int = count(MAX_PIXELS)
    least: int = count(MAX_PIXELS)

    def __attrs_post_init__(self) -> None:
        """Refuse a least side that doesn't fit."""
        if self.least > self.side:
            raise ConfigError("least", expected=f"at most side = {self.side}", got=repr(self.least))

    def pattern(self, size: Size) -> tuple[str | int, ...]:
        """Return the number of rows."""
        self._becomes(size)
        return (self.image_rows,)

    def _becomes(self, size: Size) -> Size:
        """Return the size of an image once it is resized."""
        scale = self.side / max(size)
        height, width = (max(round(one * scale), self.least) for one in size)
        return checked_resize(size, (height, width))

    def shape(self, size: Size) -> tuple[int, int, int]:
        """Return N, h and w of its pictures."""
        self._becomes(size)
        return 1, self.side, self.side

    def _pictures(self, image: Image.Image) -> list[Image.Image]:
        image = resized(image, self._becomes((image.height, image.width)), self.resample)
        return [padded(image, (self.side, self.side), mean_colour(self.mean))]

    def collate(self, items: Sequence[Mapping[str, Tensor]], sizes: Sequence[Size]) -> dict[str, Any]:
        """Return ``pixel_values`` [B, 3, h, w] of B images."""
        del sizes
        return {"pixel_values": all_pixels(items)}
