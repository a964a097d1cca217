"""Images at one longest side, in tiles whose places the text names, and whole behind them: Idefics 3, SmolVLM.

After Laurençon et al. 2024, arXiv:2408.12637, section 3.1, and Marafioti et al. 2025, arXiv:2504.05299.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from mimo.hooks import ConfigError
from mimo.model import MAX_PIXELS, MAX_ROWS, MAX_TILES
from mimo_transformers.images.pictures import checked_resize, resized, tiles
from mimo_transformers.images.processing import ImageProcessing, Size, all_pixels, count

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

_MAX_LONGEST = 4096
_AROUND = "<fake_token_around_image>"
_WHOLE = "<global-img>"


@attrs.frozen(kw_only=True)
class Idefics3Images(ImageProcessing):
    """Settings of images in tiles that are named, as of Idefics 3.

    Args:
        tile: side of one.
        tile_rows: rows that each becomes.
        longest: side in pixels that the longer one of any image becomes, at most 4096, before whole tiles are filled.
        split: whether there are tiles; otherwise every image is stretched to one.

    Raises:
        ConfigError: also if there would be too many tiles.
    """

    kind: ClassVar[str] = "idefics3"

    tile: int = count(MAX_PIXELS)
    tile_rows: int = count(MAX_ROWS)
    longest: int = count(MAX_PIXELS)
    split: bool = True

    def __attrs_post_init__(self) -> None:
        """Refuse too many tiles, and colours of which the model would take a tile for padding."""
        side = math.ceil((min(self.longest, _MAX_LONGEST) + 1) / self.tile)
        if side**2 >= MAX_TILES:
            expected = f"a side in pixels that leaves less than {MAX_TILES} tiles of {self.longest} pixels squared"
            raise ConfigError("tile", expected=expected, got=repr(self.tile))
        if all((colours == 0).any() for colours in self._scaled_bytes()):
            expected = "numbers of which no colour becomes 0 throughout, as the model takes such tiles for padding"
            raise ConfigError("mean", expected=expected, got=repr(list(self.mean)))

    def pattern(self, size: Size) -> tuple[str | int, ...]:
        """Return rows of tiles between their names."""
        down, across = self._tiling(size)
        names = []
        for row in range(1, down + 1):
            first, *others = (f"{_AROUND}<row_{row}_col_{column}>" for column in range(1, across + 1))
            names += [first if row == 1 else f"\n{first}", *others]
        names.append(f"\n\n{_AROUND}{_WHOLE}" if names else f"{_AROUND}{_WHOLE}")
        return (*(piece for name in names for piece in (name, self.tile_rows)), _AROUND)

    def _tiling(self, size: Size) -> tuple[int, int]:
        """Return how many tiles an image has down and across, 0 of each for one that is a single tile."""
        *_, (height, width) = self._sizes(size)
        down, across = height // self.tile, width // self.tile
        return (down, across) if self.split and down * across > 1 else (0, 0)

    def _sizes(self, size: Size) -> list[Size]:
        """Return the two sizes that an image is resized to: at its longest side, and of whole tiles."""
        first = checked_resize(size, _at_most(_at_longest(size, self.longest), _MAX_LONGEST))
        return [first, self._of_tiles(first) if self.split else (self.tile, self.tile)]

    def _of_tiles(self, size: Size) -> Size:
        height, width = size
        aspect = width / height

        def up(side: int) -> int:
            return math.ceil(side / self.tile) * self.tile

        if width >= height:
            return up(int(up(width) / aspect)), up(width)
        return up(height), up(int(up(height) * aspect))

    def shape(self, size: Size) -> tuple[int, int, int]:
        """Return N, h and w of its pictures."""
        return 1 + math.prod(self._tiling(size)), self.tile, self.tile

    def _pictures(self, image: Image.Image) -> list[Image.Image]:
        tiled = any(self._tiling((image.height, image.width)))
        for size in self._sizes((image.height, image.width)):
            image = resized(image, size, self.resample)
        if not tiled:
            return [image]
        side = (self.tile, self.tile)
        return [*tiles(image, side), resized(image, side, self.resample)]

    def collate(self, items: Sequence[Mapping[str, Tensor]], sizes: Sequence[Size]) -> dict[str, Any]:
        """Return ``pixel_values`` [1, tiles of all images, 3, tile, tile]: no pixel is padding, so there is no mask."""
        del sizes
        return {"pixel_values": all_pixels(items).unsqueeze(0)}


def _at_longest(size: Size, longest: int) -> Size:
    """Return a size of this longest side, the other one even where it is the shorter."""
    height, width = size
    aspect = width / height
    if width >= height:
        other = int(longest / aspect)
        return max(other + other % 2, 1), longest
    other = int(longest * aspect)
    return longest, max(other + other % 2, 1)


def _at_most(size: Size, longest: int) -> Size:
    """Return a size whose longer side is no longer than this."""
    height, width = size
    aspect = width / height
    if width >= height and width > longest:
        height, width = int(longest / aspect), longest
    elif height > width and height > longest:
        height, width = longest, int(longest * aspect)
    return max(height, 1), max(width, 1)
