"""Images in tiles of whichever resolution suits them, and the whole image before those: LLaVA-NeXT, LLaVA-OneVision.

After Liu et al. 2024 (LLaVA-NeXT, "dynamic high resolution") and Li et al. 2024, arXiv:2408.03326, section 3.2. Rows of
tiles that show the padding alone are left out, and one more row ends each line of the others. What is rounded, and how,
is as in the library, whose model must find the same number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from mimo.hooks import ConfigError, must_be
from mimo.model import MAX_LEARNED_ROWS, MAX_PATCH, MAX_PIXELS, MAX_TILES
from mimo_transformers.images.pictures import checked_resize, padded, resized, tiles
from mimo_transformers.images.processing import ImageProcessing, Size, all_pixels, count

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

_DIGITS = 7
_LITTLE_MORE = 1.1


@attrs.frozen(kw_only=True)
class TiledImages(ImageProcessing):
    """Settings of images in tiles, as of LLaVA-NeXT.

    Args:
        tile: side of one.
        patch: side of a patch, of which each becomes a row.
        class_rows: of the whole image, before those of its patches.
        resolutions: heights and widths in pixels that the tiles of an image may have in all.

    Raises:
        ConfigError: also if a resolution isn't of whole tiles.
    """

    kind: ClassVar[str] = "tiles"

    tile: int = count(MAX_PIXELS)
    patch: int = count(MAX_PATCH)
    class_rows: int = attrs.field(
        default=0, validator=must_be(f"0 to {MAX_LEARNED_ROWS}", lambda value: 0 <= value <= MAX_LEARNED_ROWS)
    )
    resolutions: tuple[tuple[int, ...], ...] = attrs.field(validator=must_be("one resolution or more", bool))

    def __attrs_post_init__(self) -> None:
        """Refuse resolutions that tiles don't fill."""
        if self.patch > self.tile:
            raise ConfigError("patch", expected=f"at most tile = {self.tile}", got=repr(self.patch))
        for one in self.resolutions:
            counts = [side // self.tile for side in one]
            whole = len(one) == 2 and all(side > 0 and side % self.tile == 0 for side in one)  # noqa: PLR2004 - height and width
            if not whole or math.prod(counts) >= MAX_TILES:
                expected = f"heights and widths of whole tiles of {self.tile} pixels, less than {MAX_TILES} tiles"
                raise ConfigError("resolutions", expected=expected, got=repr(list(one)))

    def pattern(self, size: Size) -> tuple[str | int, ...]:
        """Return the number of rows: the whole image, then tiles without padding, each line of rows with one more."""
        checked_resize(size, (self.tile, self.tile))
        self._inside(size)
        down, across = self._lines(size)
        return ((self.tile // self.patch) ** 2 + self.class_rows + down * (across + 1),)

    def _lines(self, size: Size) -> tuple[int, int]:
        """Return the rows down and across that tiles have without padding."""
        (height, width), (best_height, best_width) = size, self._best(size)
        side = self.tile // self.patch
        down, across = side * (best_height // self.tile), side * (best_width // self.tile)
        if width / height > across / down:
            inside = int(round(height * (across / width), _DIGITS))
            return down - 2 * ((down - inside) // 2), across
        inside = int(round(width * (down / height), _DIGITS))
        return down, across - 2 * ((across - inside) // 2)

    def _best(self, size: Size) -> Size:
        """Return the resolution with most of an image's own pixels; of several, that with least padding."""

        def value(resolution: Sequence[int]) -> tuple[int, int]:
            height, width = resolution
            scale = min(width / size[1], height / size[0])
            used = min(int(size[1] * scale) * int(size[0] * scale), size[0] * size[1])
            return used, used - width * height

        height, width = max(self.resolutions, key=value)
        return height, width

    def _inside(self, size: Size) -> Size:
        """Return what an image is resized to, before it is padded to its best resolution."""
        (height, width), (best_height, best_width) = size, self._best(size)
        across, down = best_width / width, best_height / height
        if across < down:
            return checked_resize(size, (min(math.ceil(height * across), best_height), best_width))
        return checked_resize(size, (best_height, min(math.ceil(width * down), best_width)))

    def shape(self, size: Size) -> tuple[int, int, int]:
        """Return N, h and w of its pictures."""
        return 1 + math.prod(side // self.tile for side in self._best(size)), self.tile, self.tile

    def _pictures(self, image: Image.Image) -> list[Image.Image]:
        size, side = (image.height, image.width), (self.tile, self.tile)
        full = padded(resized(image, self._inside(size), self.resample), self._best(size))
        return [resized(image, side, self.resample), *tiles(full, side)]

    def collate(self, items: Sequence[Mapping[str, Tensor]], sizes: Sequence[Size]) -> dict[str, Any]:
        """Return ``pixel_values`` [tiles of all, 3, tile, tile], and ``image_sizes`` [B, 2] of B images."""
        import torch

        from mimo.model.runtime import to_device

        pixels = all_pixels(items)
        return {"pixel_values": pixels, "image_sizes": to_device(torch.tensor(sizes), pixels.device)}


@attrs.frozen(kw_only=True)
class OneVisionImages(TiledImages):
    """Settings of images in tiles, as of LLaVA-OneVision, each as if it were the only one of its sample.

    Args:
        max_tiles: as many rows as this many tiles have are kept; more are resized to these.
    """

    kind: ClassVar[str] = "onevision"

    max_tiles: int = count(MAX_TILES)

    def _lines(self, size: Size) -> tuple[int, int]:
        down, across = super()._lines(size)
        ratio = math.sqrt(down * across / (self.max_tiles * (self.tile // self.patch) ** 2))
        return (int(down // ratio), int(across // ratio)) if ratio > _LITTLE_MORE else (down, across)
