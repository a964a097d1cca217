"""Images of nearly their own size, handed to the model as patches: Qwen2-VL, Qwen2.5-VL, Qwen3-VL.

After Wang et al. 2024, arXiv:2409.12191, section 2.1, and the library's ``smart_resize``. Shapes: P patches of all
images, T times that a picture is repeated to fill the frames of a patch, p side of a patch, m side in patches of what
becomes one row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs

from mimo.hooks import ConfigError, must_be
from mimo.model import MAX_PATCH, MAX_TILES
from mimo_transformers.images.pictures import MAX_CANVAS, checked_canvas, checked_resize, resized
from mimo_transformers.images.processing import ImageProcessing, Size, count

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

_MAX_ASPECT = 200


@attrs.frozen(kw_only=True)
class PatchImages(ImageProcessing):
    """Settings of images of nearly their own size, as of Qwen2-VL.

    Args:
        patch: p.
        merge: m.
        frames: T.
        min_pixels: of an image; a smaller one is enlarged.
        max_pixels: of an image; a larger one is shrunk.
        enlarge: whether an image with a side shorter than a row's is enlarged before all else, and what becomes of
            fractions of a pixel: ``cut`` off, or ``rounded``.
        says_merge: whether the model is handed m of each image.

    Raises:
        ConfigError: also if nothing lies between ``min_pixels`` and ``max_pixels``.
    """

    kind: ClassVar[str] = "patches"

    patch: int = count(MAX_PATCH)
    merge: int = count(MAX_TILES)
    frames: int = count(MAX_TILES)
    min_pixels: int = count(MAX_CANVAS)
    max_pixels: int = count(MAX_CANVAS)
    enlarge: Literal["no", "cut", "rounded"] = attrs.field(
        default="no", validator=must_be("no, cut or rounded", lambda value: value in {"no", "cut", "rounded"})
    )
    says_merge: bool = False

    def __attrs_post_init__(self) -> None:
        """Refuse bounds in the wrong order."""
        low = max(self.min_pixels, self._cell**2)
        if self.max_pixels < low:
            raise ConfigError("max_pixels", expected=f"at least {low}", got=repr(self.max_pixels))

    @property
    def _cell(self) -> int:
        """Side in pixels of what becomes one row."""
        return self.patch * self.merge

    def pattern(self, size: Size) -> tuple[str | int, ...]:
        """Return the number of rows."""
        return (math.prod(self.grid(size)),)

    def grid(self, size: Size) -> tuple[int, int, int]:
        """Return (1, rows down, rows across)."""
        height, width = self._becomes(size)
        return 1, height // self._cell, width // self._cell

    def _becomes(self, size: Size) -> Size:
        size = height, width = checked_canvas(size, self._enlarged(size))
        if max(size) / min(size) > _MAX_ASPECT:
            shown = f"an image of {height} x {width} pixels (height x width)"
            raise ValueError(f"{shown} has one side more than {_MAX_ASPECT} times as long as the other")
        cell = self._cell
        down, across = (round(side / cell) * cell for side in size)
        if down * across > self.max_pixels:
            scale = math.sqrt(height * width / self.max_pixels)
            down, across = (max(cell, math.floor(side / scale / cell) * cell) for side in size)
        elif down * across < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            down, across = (math.ceil(side * scale / cell) * cell for side in size)
        return checked_resize(size, (down, across))

    def _enlarged(self, size: Size) -> Size:
        """Return a size whose sides are as long as a row's, where smaller ones are enlarged first."""
        cell, (height, width) = self._cell, size
        if self.enlarge == "cut" and min(size) < cell:
            scale = max(cell / height, cell / width)
            return int(height * scale), int(width * scale)
        if self.enlarge == "rounded":
            if height < cell:
                height, width = cell, round(width * cell / height)
            if width < cell:
                height, width = round(height * cell / width), cell
        return height, width

    def shape(self, size: Size) -> tuple[int, int, int]:
        """Return N, h and w of its pictures."""
        return 1, *self._becomes(size)

    def _pictures(self, image: Image.Image) -> list[Image.Image]:
        return [resized(image, self._becomes((image.height, image.width)), self.resample)]

    def collate(self, items: Sequence[Mapping[str, Tensor]], sizes: Sequence[Size]) -> dict[str, Any]:
        """Return ``pixel_values`` [P, 3 T p p], and ``image_grid_thw`` [B, 3] of B images: 1, then their patches.

        Where the model is handed it, ``image_merge_sizes`` [B] too.
        """
        import torch

        from mimo.model.runtime import to_device

        pixels = torch.cat([self._patches(item["pixels"]) for item in items])
        grids = [(one, down * self.merge, across * self.merge) for one, down, across in map(self.grid, sizes)]
        given = {"pixel_values": pixels, "image_grid_thw": to_device(torch.tensor(grids), pixels.device)}
        if self.says_merge:
            given["image_merge_sizes"] = torch.full((len(grids),), self.merge, device=pixels.device)
        return given

    def _patches(self, pixels: Tensor) -> Tensor:
        """Return the patches of a picture [1, 3, h, w], those that become one row one after the other."""
        merge, side = self.merge, self.patch
        cells: Tensor = pixels[0].unflatten(2, (-1, merge, side)).unflatten(1, (-1, merge, side))
        # [3, rows down, m, p, rows across, m, p] to [rows down, rows across, m, m, 3, 1, p, p]
        patches: Tensor = cells.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5)
        return patches.expand(*patches.shape[:5], self.frames, side, side).flatten(4).flatten(0, 3)


@attrs.frozen(kw_only=True)
class LinePatchImages(PatchImages):
    """Settings of images of nearly their own size in patches line by line, as of PaddleOCR-VL."""

    kind: ClassVar[str] = "line_patches"

    def _patches(self, pixels: Tensor) -> Tensor:
        """Return the patches [P, 3 T, p, p] of a picture [1, 3, h, w], each line of them after the one before."""
        side = self.patch
        cells: Tensor = pixels[0].unflatten(2, (-1, side)).unflatten(1, (-1, side))
        # [3, down, p, across, p] to [down, across, 3, 1, p, p]
        patches: Tensor = cells.permute(1, 3, 0, 2, 4).unsqueeze(3)
        return patches.expand(*patches.shape[:3], self.frames, side, side).flatten(2, 3).flatten(0, 1)
