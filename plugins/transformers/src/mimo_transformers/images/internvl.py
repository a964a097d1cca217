"""Images in tiles of the aspect nearest to their own, and a thumbnail behind several: InternVL, Aya Vision.

After Chen et al. 2024, arXiv:2404.16821, section 3.1; aspects are compared as floats, as in the library.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from mimo.hooks import ConfigError
from mimo.model import MAX_PIXELS, MAX_ROWS, MAX_TILES
from mimo_transformers.images.pictures import checked_resize, resized, tiles
from mimo_transformers.images.processing import ImageProcessing, Size, all_pixels, count

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor


@attrs.frozen(kw_only=True)
class InternVlImages(ImageProcessing):
    """Settings of images in tiles, as of InternVL.

    Args:
        tile: side of one.
        tile_rows: rows that each becomes.
        min_tiles: of an image, without the thumbnail.
        max_tiles: likewise.

    Raises:
        ConfigError: also if no number lies between ``min_tiles`` and ``max_tiles``.
    """

    kind: ClassVar[str] = "internvl"

    tile: int = count(MAX_PIXELS)
    tile_rows: int = count(MAX_ROWS)
    min_tiles: int = count(MAX_TILES, default=1)
    max_tiles: int = count(MAX_TILES)

    def __attrs_post_init__(self) -> None:
        """Refuse bounds in the wrong order."""
        if self.min_tiles > self.max_tiles:
            raise ConfigError("min_tiles", expected=f"at most max_tiles = {self.max_tiles}", got=repr(self.min_tiles))

    def pattern(self, size: Size) -> tuple[str | int, ...]:
        """Return the number of rows."""
        down, across = self._tiling(size)
        return (self.tile_rows * (down * across + (down * across > 1)),)

    def _tiling(self, size: Size) -> tuple[int, int]:
        """Return how many tiles an image has down and across.

        Of those that are equally near to its aspect, the last one that it fills by more than half.
        """
        height, width = size
        best, nearest = (1, 1), math.inf
        for down, across in sorted(self._grids(), key=math.prod):
            difference = abs(width / height - across / down)
            fills = width * height > 0.5 * self.tile**2 * down * across
            if difference < nearest or (difference == nearest and fills):
                best, nearest = (down, across), difference
        checked_resize(size, (best[0] * self.tile, best[1] * self.tile))
        return best

    def _grids(self) -> Iterator[tuple[int, int]]:
        """Yield all tilings, narrow ones first."""
        for across in range(1, self.max_tiles + 1):
            for down in range(1, self.max_tiles // across + 1):
                if down * across >= self.min_tiles:
                    yield down, across

    def shape(self, size: Size) -> tuple[int, int, int]:
        """Return N, h and w of its pictures."""
        count = math.prod(self._tiling(size))
        return count + (count > 1), self.tile, self.tile

    def _pictures(self, image: Image.Image) -> list[Image.Image]:
        down, across = self._tiling((image.height, image.width))
        side = (self.tile, self.tile)
        cut = tiles(resized(image, (down * self.tile, across * self.tile), self.resample), side)
        return [*cut, resized(image, side, self.resample)] if len(cut) > 1 else cut

    def collate(self, items: Sequence[Mapping[str, Tensor]], sizes: Sequence[Size]) -> dict[str, Any]:
        """Return ``pixel_values`` [tiles of all images, 3, tile, tile]."""
        del sizes
        return {"pixel_values": all_pixels(items)}


@attrs.frozen(kw_only=True)
class NamedTileImages(InternVlImages):
    """Settings of images in tiles that are numbered, as of Aya Vision.

    Args:
        tile_name: text before the rows of each tile, with its number.
        whole_name: text before those of the thumbnail, or of the only tile.
    """

    kind: ClassVar[str] = "named_tiles"

    tile_name: str
    whole_name: str

    def pattern(self, size: Size) -> tuple[str | int, ...]:
        """Return rows of tiles behind their names."""
        (rows,) = super().pattern(size)
        assert isinstance(rows, int)
        names = [f"{self.tile_name}_{number}" for number in range(1, rows // self.tile_rows)]
        return tuple(piece for name in (*names, self.whole_name) for piece in (name, self.tile_rows))
