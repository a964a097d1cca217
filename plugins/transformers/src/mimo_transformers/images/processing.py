"""What becomes of one image before a published model sees it, whatever the kind: sizes, texts, and numbers of pixels.

The published processors work in bytes with Pillow up to the last step, which scales them; so does this, to the bit. All
sizes are (height, width) in pixels. Shapes: N pictures of one size that an image becomes, h and w their sides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, final

import attrs
import numpy as np

from mimo.hooks import above_zero, must_be
from mimo_transformers.images.pictures import COLOURS, RESAMPLES, in_colour

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

Size: TypeAlias = tuple[int, int]
Resample: TypeAlias = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]

_BYTES = 256
_NORMAL_RANGE = 1e4


def _colours(expected: str, low: float, high: float) -> Any:
    return must_be(
        f"{COLOURS} {expected}", lambda values: len(values) == COLOURS and all(low <= one <= high for one in values)
    )


def count(most: int, *, default: int | None = None) -> Any:
    """Declare a field that is a whole number from 1 to ``most``."""
    given: dict[str, Any] = {} if default is None else {"default": default}
    return attrs.field(validator=must_be(f"1 to {most}", lambda value: 1 <= value <= most), **given)


@attrs.frozen(kw_only=True)
class ImageProcessing(ABC):
    """How the image processor and the text processor of a published model treat one image.

    A subclass says in `pattern` what stands in a text for an image of some size, in `shape` and `_pictures` of which
    pictures of one size it consists, and in `collate` how a model of the library is handed several.

    Args:
        marker: what the chat template writes for one image.
        placeholder: the token of one row of an image.
        before: text before the rows of an image of any size.
        after: text behind them.
        resample: the filter with which pictures are resized.
        rescale: by which bytes are multiplied first.
        mean: subtracted from the products, one number for each of three colours.
        std: by which the differences are divided, likewise.

    Raises:
        ConfigError: a value is out of range.
    """

    kind: ClassVar[str]
    rows_key: ClassVar[str] = ""
    """The setting that alone says how many rows an image becomes; empty where several say it together."""

    marker: str = attrs.field(validator=must_be("a text", bool))
    placeholder: str = attrs.field(validator=must_be("a text", bool))
    before: str = ""
    after: str = ""
    resample: Resample = attrs.field(
        default="bicubic", validator=must_be(f"one of {', '.join(RESAMPLES)}", lambda value: value in RESAMPLES)
    )
    rescale: float = attrs.field(default=1 / 255, validator=above_zero())
    mean: tuple[float, ...] = attrs.field(validator=_colours("numbers", -_NORMAL_RANGE, _NORMAL_RANGE))
    std: tuple[float, ...] = attrs.field(validator=_colours("numbers above 0", 1 / _NORMAL_RANGE, _NORMAL_RANGE))

    @abstractmethod
    def pattern(self, size: Size) -> tuple[str | int, ...]:
        """Return what stands between ``before`` and ``after``: numbers of rows, and texts between them.

        Args:
            size: of the image.

        Raises:
            ValueError: the published processor refuses an image of this size, or would make one of unbounded size.
        """

    @final
    def rows(self, size: Size) -> int:
        """Return how many rows of the language model an image of a size becomes.

        Raises:
            ValueError: as `pattern`.
        """
        return sum(piece for piece in self.pattern(size) if isinstance(piece, int))

    @final
    def text(self, size: Size) -> str:
        """Return what the published processor puts in the place of one marker.

        Raises:
            ValueError: as `pattern`.
        """
        pieces = (piece if isinstance(piece, str) else self.placeholder * piece for piece in self.pattern(size))
        return "".join((self.before, *pieces, self.after))

    def grid(self, size: Size) -> tuple[int, int, int] | None:
        """Return (1, rows down, rows across) where positions of the language model follow the rows of an image.

        Raises:
            ValueError: as `pattern`.
        """
        del size
        return None

    @final
    def prepare(self, image: Image.Image) -> dict[str, Tensor]:
        """Return the numbers of an image: ``pixels`` [N, 3, h, w] in float32.

        Args:
            image: of any mode of 8 bits; what is transparent becomes white.

        Raises:
            ValueError: as `pattern`, or the image's mode has other numbers than bytes.
            OSError: it can't be decoded.
        """
        self.pattern((image.height, image.width))  # before anything is allocated
        return {"pixels": self._scaled(self._pictures(in_colour(image)))}

    @abstractmethod
    def shape(self, size: Size) -> tuple[int, int, int]:
        """Return N, h and w of the pictures that an image of a size becomes.

        Raises:
            ValueError: as `pattern`.
        """

    @abstractmethod
    def _pictures(self, image: Image.Image) -> list[Image.Image]:
        """Return the pictures in colour, all of one size, of which an image in colour consists."""

    @abstractmethod
    def collate(self, items: Sequence[Mapping[str, Tensor]], sizes: Sequence[Size]) -> dict[str, Any]:
        """Return the keyword arguments of the library's ``get_image_features`` for images in order.

        Args:
            items: one or more of what `prepare` returns, on one device.
            sizes: of the images.
        """

    def _scaled(self, pictures: Sequence[Image.Image]) -> Tensor:
        """Return pictures as [N, 3, h, w]."""
        import torch

        table = self._scaled_bytes()
        width, height = pictures[0].size
        pixels = np.empty((len(pictures), COLOURS, height, width), np.float32)
        for picture, numbers in zip(pictures, pixels, strict=True):
            for colour, band in enumerate(picture.split()):
                np.take(table[colour], np.asarray(band), out=numbers[colour], mode="clip")
        return torch.from_numpy(pixels)

    def _scaled_bytes(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return [3, 256]: what becomes of each byte, rounded as often as in the library."""
        rescaled = (np.arange(_BYTES, dtype=np.float64) * self.rescale).astype(np.float32)
        mean, std = (np.array(values, np.float32)[:, None] for values in (self.mean, self.std))
        return ((rescaled - mean) / std).astype(np.float32)


def all_pixels(items: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Return the pictures of all images one after the other, [N of all, 3, h, w]."""
    import torch

    return torch.cat([item["pixels"] for item in items])
