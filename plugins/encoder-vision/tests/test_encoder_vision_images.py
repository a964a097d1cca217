"""From images to pixels: sizes, channels, scaling, and that the published processors make the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

from mimo_encoder_vision import CLIP, SIGLIP, VIT, ClipConfig, SiglipConfig, VisionConfig, VitConfig
from mimo_encoder_vision._grids import grids_of

SIZES = ((30, 41), (224, 224), (17, 90), (64, 9), (1, 1), (301, 300))


def _image(size: tuple[int, int], mode: str = "RGB") -> Image.Image:
    values = np.random.default_rng(size).integers(0, 256, (*size, 3), dtype=np.uint8)
    return Image.fromarray(values).convert(mode)


def _pixels(spec: Any, config: VisionConfig, image: Image.Image) -> Tensor:
    found = spec.prepare(config, image)["pixels"]
    assert isinstance(found, Tensor)
    assert found.dtype == torch.float32
    return found


def _check_pixels(_rank: int) -> None:
    values = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    image = Image.fromarray(values)
    assert VIT.measure(image) == (8, 8)
    small = VitConfig(patch=4, channels=1)
    pixels = _pixels(VIT, small, image)
    assert pixels.shape == (1, 1, 8, 8)
    torch.testing.assert_close(pixels[0, 0], torch.from_numpy(values) / 127.5 - 1)
    colour = VitConfig(patch=4, channels=3, max_patches=6)
    for mode, size in (("L", (8, 8)), ("RGBA", (5, 7)), ("P", (1, 1)), ("1", (300, 2)), ("CMYK", (9, 40))):
        image = Image.new(mode, size)
        found = _pixels(VIT, colour, image)
        ((down, across),) = grids_of(colour, VIT.measure(image))
        assert found.shape == (1, 3, down * 4, across * 4)
        assert found.abs().max() <= 1
    assert torch.equal(_pixels(VIT, colour, Image.new("RGB", (4, 4), "white")), torch.ones(1, 3, 4, 4))
    scaled = VitConfig(patch=4, mean=(0.0, 0.5, 1.0), std=(1.0, 0.5, 2.0))
    found = _pixels(VIT, scaled, Image.new("RGB", (4, 4), (255, 0, 51)))
    torch.testing.assert_close(found[0, :, 0, 0], torch.tensor([1.0, -1.0, -0.4]))
    image = _image((8, 8))
    before = image.tobytes()
    assert torch.equal(_pixels(VIT, colour, image), _pixels(VIT, colour, image.convert("RGBA")))
    assert image.tobytes() == before


def test_prepared_pixels(run_ranks: Callable[..., list[Any]]) -> None:
    """Any mode and size becomes channels, whole patches and scaled values; a picture itself stays as it is."""
    run_ranks(1, _check_pixels)


def _check_published(_rank: int) -> None:
    siglip, clip = SiglipConfig(size=32, patch=8), ClipConfig(size=32, patch=8)
    naflex = SiglipConfig(mode="native", enlarge=True, max_patches=20, patch=8, resample="bilinear")
    tiled = ClipConfig(mode="tiles", size=32, patch=8, max_tiles=6)
    theirs: Any
    for size in SIZES:
        image = _image(size)
        theirs = SiglipImageProcessorPil(size={"height": 32, "width": 32})(image)
        _compare(_pixels(SIGLIP, siglip, image), theirs["pixel_values"])
        if max(size) < 16 * min(size):
            theirs = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})(image)
            _compare(_pixels(CLIP, clip, image), theirs["pixel_values"])
        theirs = Siglip2ImageProcessorPil(patch_size=8, max_num_patches=20)(image)
        down, across = (int(each) for each in theirs["spatial_shapes"][0])
        patches = _pixels(SIGLIP, naflex, image).unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 4, 5, 1).flatten(3)
        _compare(patches.flatten(1, 2)[0], theirs["pixel_values"][0][: down * across])
        process: Any = GotOcr2ImageProcessorPil(size={"height": 32, "width": 32})
        theirs = process(image, crop_to_patches=True, min_patches=1, max_patches=6)
        found = _pixels(CLIP, tiled, image)
        assert len(found) == len(grids_of(tiled, size))
        _compare(found, theirs["pixel_values"])


def _compare(found: Tensor, wanted: Any) -> None:
    torch.testing.assert_close(found, torch.from_numpy(np.asarray(wanted, dtype=np.float32)), rtol=1e-5, atol=1e-5)


def test_pixels_are_those_of_the_published_processors(run_ranks: Callable[..., list[Any]]) -> None:
    """Stretched (SigLIP), covered and cut (CLIP), at nearly their size (NaFlex), and in tiles with a thumbnail."""
    run_ranks(1, _check_published)


def _check_extremes(_rank: int) -> None:
    configs = (
        (CLIP, ClipConfig(size=28)),
        (CLIP, ClipConfig(size=28, mode="tiles")),
        (SIGLIP, SiglipConfig(size=32)),
        (SIGLIP, SiglipConfig(mode="native", enlarge=True)),
        (VIT, VitConfig()),
    )
    for size in ((1, 1), (20000, 1), (1, 20000), (2, 20000), (300, 20000)):
        image = Image.new("RGB", size[::-1], "white")
        for spec, config in configs:
            pixels = _pixels(spec, config, image)
            rows = [(tile.shape[1] // config.patch, tile.shape[2] // config.patch) for tile in pixels]
            assert rows == grids_of(config, size)
            assert pixels.numel() < 3 * 2**20  # not in the image's own aspect, whatever it is
            assert (pixels == pixels[0, :, :1, :1]).all()


def test_images_of_any_size(run_ranks: Callable[..., list[Any]]) -> None:
    """From one pixel to lines of 20,000; nothing becomes larger than the encoder takes."""
    run_ranks(1, _check_extremes)


def _check_broken(_rank: int, path: str) -> None:
    image = Image.open(path)
    assert VIT.measure(image) == (300, 300)
    with pytest.raises(OSError, match="truncated"):
        VIT.prepare(VitConfig(), image)


def test_a_broken_file_is_named(run_ranks: Callable[..., list[Any]], tmp_path: Any) -> None:
    """What its decoder says comes out as the error that names sample and file."""
    path = tmp_path / "cut.png"
    _image((300, 300)).save(path)
    path.write_bytes(path.read_bytes()[:1000])
    run_ranks(1, _check_broken, str(path))
