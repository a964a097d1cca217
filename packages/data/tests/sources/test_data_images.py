"""Images of files: what is deeper than eight bits must not become white."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mimo.data import load_image

GREYS = np.array([[0, 257, 3 * 257 + 5, 40_000, 65_535]], dtype=np.uint16)


@pytest.mark.parametrize("name", ["a.png", "a.tiff"])
def test_greys_of_16_bits_come_as_8(name: str, tmp_path: Path) -> None:
    """By scale; Pillow alone would make all above 255 white."""
    Image.fromarray(GREYS).save(tmp_path / name)
    found = load_image(tmp_path / name)
    assert found.mode == "L"
    assert np.asarray(found.convert("RGB"))[0, :, 0].tolist() == [0, 1, 3, 155, 255]


def test_images_of_8_bits_are_as_stored(tmp_path: Path) -> None:
    """Palettes and alpha too."""
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA"):
        Image.new(mode, (3, 2)).save(tmp_path / "a.png")
        assert load_image(tmp_path / "a.png").mode == mode


@pytest.mark.parametrize(("mode", "name"), [("F", "a.tiff"), ("I", "a.tiff")])
def test_numbers_without_a_white_are_refused(mode: str, name: str, tmp_path: Path) -> None:
    """As a range would have to be guessed."""
    Image.new(mode, (2, 2), 3).save(tmp_path / name)
    with pytest.raises(ValueError, match=f"its pixels are of Pillow's mode '{mode}', of which nothing tells what is"):
        load_image(tmp_path / name)
