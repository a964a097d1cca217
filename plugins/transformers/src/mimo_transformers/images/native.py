"""Images of their own size in whole patches, whose lines the text ends by a token: Pixtral, Mistral 3.

After Agrawal et al. 2024, arXiv:2410.07073, section 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from mimo.model import MAX_PATCH, MAX_PIXELS
from mimo_transformers.images.pictures import checked_canvas, checked_resize, resized
from mimo_transformers.images.processing import ImageProcessing, Size, count

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor


@attrs.frozen(kw_only=True)
class NativeImages(ImageProcessing):
    """Settings of images of their own size, as of Pixtral.

    Args:
        patch: side in pixels of what becomes one row: a patch, or as many as are merged.
        longest: side in pixels that neither one exceeds, but for the rest of a patch; larger images are shrunk.
        line_end: text behind each line of rows but the last, empty for none.
        image_end: text behind that one, likewise.
    """

    kind: ClassVar[str] = "native"

    patch: int = count(MAX_PATCH)
    longest: int = count(MAX_PIXELS)
    line_end: str = "[IMG_BREAK]"
    image_end: str = "[IMG_END]"

    def pattern(self, size: Size) -> tuple[str | int, ...]:
        """Return rows of each line, and what ends it; without that the rows of all."""
        height, width = self._becomes(size)
        down, across = height // self.patch, width // self.patch
        lines = (across, self.line_end) * down if self.line_end else (down * across, "")
        return (*lines[:-1], self.image_end) if self.image_end else lines[:-1]

    def _becomes(self, size: Size) -> Size:
        height, width = size
        ratio = max(height / self.longest, width / self.longest)
        if ratio > 1:
            height, width = checked_canvas(size, (math.floor(height / ratio), math.floor(width / ratio)))
        down, across = ((side - 1) // self.patch + 1 for side in (height, width))
        return checked_resize(size, (down * self.patch, across * self.patch))

    def shape(self, size: Size) -> tuple[int, int, int]:
        """Return N, h and w of its pictures."""
        return 1, *self._becomes(size)

    def _pictures(self, image: Image.Image) -> list[Image.Image]:
        return [resized(image, self._becomes((image.height, image.width)), self.resample)]

    def collate(self, items: Sequence[Mapping[str, Tensor]], sizes: Sequence[Size]) -> dict[str, Any]:
        """Return ``pixel_values`` [B, 3, h, w] of B images, padded to the largest, and their ``image_sizes`` [B, 2]."""
        import torch
        from torch.nn import functional

        from mimo.model.runtime import to_device

        del sizes
        pixels = [item["pixels"] for item in items]
        found = torch.tensor([one.shape[2:] for one in pixels])
        height, width = found.amax(0).tolist()
        padded = [functional.pad(one, (0, width - one.shape[3], 0, height - one.shape[2])) for one in pixels]
        return {"pixel_values": torch.cat(padded), "image_sizes": to_device(found, pixels[0].device)}
