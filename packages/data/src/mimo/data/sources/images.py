"""Untrusted image files: size by header, pixels on demand, nothing executed and no memory bomb."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mimo.data.loading import is_read_failure, retried

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""What is opened. A closed list, since Pillow starts an outside program for some formats (EPS)."""

MAX_PIXELS = 2**26
"""Largest image that is decoded, by its header: 67,108,864 pixels. Below Pillow's own limit."""


def image_size(path: Path | bytes) -> tuple[int, int]:
    """Return (height, width) in pixels from the header.

    Raises:
        ValueError: not an image of `FORMATS`, or larger than `MAX_PIXELS`.
        OSError: the file system fails, also when asked again.
    """
    return retried(partial(_size, path))


def load_image(path: Path | bytes) -> Image.Image:
    """Return the decoded image, the first frame, in the mode and orientation in which it is stored.

    But for greys of 16 bits, which come as 8 bits: converted by Pillow, all but the darkest would be white.

    Raises:
        ValueError: as `image_size`, or the pixels are damaged, or of a kind of which nothing tells what is white.
        OSError: the file system fails.
    """
    with open_image(path) as image:
        image.load()
        return _in_bytes(image)


def _size(path: Path | bytes) -> tuple[int, int]:
    with open_image(path) as image:
        return image.height, image.width


def _in_bytes(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        from PIL import Image

        return Image.fromarray((np.asarray(image) // 257).astype(np.uint8))
    if image.mode in {"I", "F"}:
        msg = f"its pixels are of Pillow's mode {image.mode!r}, of which nothing tells what is white: save it in 8 bits"
        raise ValueError(msg)
    return image


@contextmanager
def open_image(path: Path | bytes) -> Iterator[Image.Image]:
    """Open an image, a file or what one holds, of which the header was read and no pixel; it is closed at the end.

    Raises:
        ValueError: as `image_size`.
    """
    from PIL import Image, UnidentifiedImageError  # heavy, and only readers of images need it

    # Not only because a folder is no image: opening a named pipe would wait forever.
    try:
        is_there = not isinstance(path, Path) or path.is_file()
    except OSError as error:  # a name that is too long
        if is_read_failure(error):
            raise
        raise ValueError(error.strerror) from None
    if not is_there:
        msg = "there is no such file"
        raise ValueError(msg)
    try:
        with Image.open(path if isinstance(path, Path) else io.BytesIO(path), formats=FORMATS) as image:
            _check_pixels(image)
            yield image
    except UnidentifiedImageError as error:
        msg = f"it is no image of the formats {', '.join(FORMATS)}"
        raise ValueError(msg) from error
    except Image.DecompressionBombError as error:  # a limit of Pillow's own, that is higher
        msg = f"it has more than {MAX_PIXELS:,} pixels in all"
        raise ValueError(msg) from error
    except Exception as error:  # decoders of damaged files raise anything
        if is_read_failure(error):
            raise
        raise ValueError(str(error) or type(error).__name__) from error


def _check_pixels(image: Image.Image) -> None:
    if image.width * image.height > MAX_PIXELS:
        msg = f"it has {image.width} x {image.height} pixels, more than {MAX_PIXELS:,} in all"
        raise ValueError(msg)
