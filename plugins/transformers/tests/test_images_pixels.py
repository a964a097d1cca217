"""Numbers of pixels, to the bit those of the library's own image processors."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
import torch
from library_images import library_inputs, module_of
from PIL import Image
from published_images import EACH, FOLDERS, SIZES, picture
from small_models import is_older

from mimo_transformers.images import PARITY


def _assert_same(name: str, image: Image.Image) -> None:
    processing = FOLDERS[name].processing()
    found = processing.collate([processing.prepare(image)], [(image.height, image.width)])
    wanted = library_inputs(name, [image])
    pixels = wanted["pixel_values"].float()
    assert torch.equal(found["pixel_values"], pixels[0] if processing.kind in {"tiles", "onevision"} else pixels)
    for key in set(found) - {"pixel_values"}:
        assert torch.equal(found[key], torch.as_tensor(wanted[key])), key
    if "pixel_attention_mask" in wanted:
        assert wanted["pixel_attention_mask"].all()  # so none is handed on


@EACH
def test_pixels_are_those_of_the_library(name: str) -> None:
    """Of tiny, wide, tall and large pictures, tiles that fit exactly and others; and what else a model is handed."""
    assert PARITY[FOLDERS[name].processing().kind]["pixels"] == "library"
    for size in SIZES:
        _assert_same(name, picture(size))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "L", "1", "P", "CMYK"])
@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_pictures_of_any_mode(name: str, mode: str) -> None:
    """They become colours; what is transparent becomes white."""
    if is_older("5.23") and mode in {"RGBA", "LA"}:
        pytest.skip("an older library leaves the colours of what is transparent")
    _assert_same(name, picture((40, 33), mode))


def test_what_a_palette_calls_transparent_is_white() -> None:
    """A colour of the palette that the file names as transparent."""
    image = Image.new("P", (9, 9), 3)
    image.info["transparency"] = 3
    found = FOLDERS["gemma3"].processing().prepare(image)["pixels"]
    assert (found == 1).all()


@pytest.mark.parametrize("mode", ["I", "I;16", "F"])
def test_a_picture_without_a_white_is_refused(mode: str) -> None:
    """Numbers that aren't bytes."""
    text = f"^an image of Pillow's mode '{mode}', whose white is not known: save it in 8 bits$"
    with pytest.raises(ValueError, match=text):
        FOLDERS["llava"].processing().prepare(Image.new(mode, (4, 4)))


@pytest.mark.parametrize(
    "changes",
    [
        {"do_rescale": False},
        {"do_normalize": False},
        {"rescale_factor": 1 / 127.5, "image_mean": [1.0, 1.0, 1.0], "image_std": [1.0, 1.0, 1.0]},
        {"resample": 0},
        {"resample": 1},
        {"do_center_crop": False, "size": {"height": 20, "width": 31}},
        {"do_center_crop": True, "size": {"height": 20, "width": 31}, "crop_size": {"height": 25, "width": 24}},
        {"size": 30, "crop_size": 33},
    ],
    ids=str,
)
def test_other_settings_of_a_plain_processor(changes: dict[str, Any]) -> None:
    """Scaling, filters and sizes, also cuts larger than the picture, which are black around it."""
    config = {key: value for key, value in FOLDERS["llava"].config.items() if key != "vision_config"}
    config["vision_config"] = {"patch_size": 5}
    processor = {"num_additional_image_tokens": 1, "patch_size": 5}
    preprocessor = {**FOLDERS["llava"].preprocessor, **changes}
    folder = attrs.evolve(FOLDERS["llava"], config=config, preprocessor=preprocessor, processor=processor)

    for size in ((31, 44), (90, 20), (3, 2)):
        image = picture(size)
        processing = folder.processing()
        given = {key: value for key, value in preprocessor.items() if key != "image_processor_type"}
        process = module_of("image_processing_pil", "clip").CLIPImageProcessorPil(**given)
        found = processing.prepare(image)["pixels"]
        wanted = np.asarray(process(image)["pixel_values"], np.float32)
        assert torch.equal(found, torch.from_numpy(wanted))


def test_many_images_at_once_are_those_of_each() -> None:
    """The library pads tiles of some images; here they follow one another, and Pixtral's are padded likewise."""
    images = [picture(size) for size in SIZES[-4:]]
    sizes = [(image.height, image.width) for image in images]
    for name in ("mistral3", "qwen3_vl", "internvl", "llava"):
        processing = FOLDERS[name].processing()
        found = processing.collate([processing.prepare(image) for image in images], sizes)
        wanted = library_inputs(name, images)
        for key, value in found.items():
            assert torch.equal(value, torch.as_tensor(wanted[key])), (name, key)


def test_tilings_of_several_tiles_at_least() -> None:
    """InternVL's, as its image processor chooses them."""
    folder = FOLDERS["internvl"]
    preprocessor = {**folder.preprocessor, "min_patches": 3}
    process: Any = module_of("image_processing_pil", "got_ocr2").GotOcr2ImageProcessorPil(size=preprocessor["size"])
    for size in ((20, 20), (20, 40), (90, 30)):
        found = attrs.evolve(folder, preprocessor=preprocessor).processing().prepare(picture(size))["pixels"]
        wanted = process(picture(size), crop_to_patches=True, min_patches=3, max_patches=6, return_tensors="pt")
        assert torch.equal(found, wanted["pixel_values"])


@pytest.mark.parametrize("size", [(8, 1600), (1600, 8)], ids=str)
def test_a_large_line_keeps_a_row_across(size: tuple[int, int]) -> None:
    """Qwen's, which would be shrunk to less than a patch."""
    _assert_same("qwen3_vl", picture(size))
