"""How many rows images of any size become with settings as published, by formulas of the library alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from library_images import library_inputs, module_of
from PIL import Image
from published_images import FOLDERS, picture

from mimo_transformers.image_files import processing_of
from mimo_transformers.images import ImageProcessing

_NEXT = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
_ONEVISION = [[down, across] for down in range(384, 2305, 384) for across in range(384, 2305, 384)]
_CLIP = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
_SIGLIP = {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14}
_COVERED = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}

REAL: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]] = {
    "llava": (
        {"model_type": "llava", "vision_config": _CLIP},
        {"image_processor_type": "CLIPImageProcessor", **_COVERED},
        {},
    ),
    "llava_next": (
        {"model_type": "llava_next", "vision_config": _CLIP, "image_grid_pinpoints": _NEXT},
        {"image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": _NEXT, **_COVERED},
        {"patch_size": 14, "vision_feature_select_strategy": "default"},
    ),
    "llava_onevision": (
        {"model_type": "llava_onevision", "vision_config": _SIGLIP, "vision_aspect_ratio": "anyres_max_9"},
        {"image_processor_type": "LlavaOnevisionImageProcessor"},
        {"num_image_tokens": 729, "vision_feature_select_strategy": "full"},
    ),
    "qwen2_vl": (
        {"model_type": "qwen2_vl"},
        {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12845056},
        {},
    ),
    "qwen3_vl": (
        {"model_type": "qwen3_vl"},
        {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "patch_size": 16,
            "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        },
        {},
    ),
    "internvl": (
        {"model_type": "internvl", "image_seq_length": 256},
        {"image_processor_type": "GotOcr2ImageProcessorFast", "size": {"height": 448, "width": 448}},
        {"image_seq_length": 256},
    ),
    "idefics3": (
        {"model_type": "idefics3", "vision_config": {"image_size": 364}},
        {"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 5000}},
        {},
    ),
    "smolvlm": (
        {"model_type": "smolvlm"},
        {
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 2048},
            "max_image_size": {"longest_edge": 512},
        },
        {"image_seq_len": 64},
    ),
    "mistral3": (
        {"model_type": "mistral3", "spatial_merge_size": 2},
        {"image_processor_type": "PixtralImageProcessorFast", "size": {"longest_edge": 1540}},
        {"patch_size": 14, "spatial_merge_size": 2},
    ),
    "gemma3": (
        {"model_type": "gemma3", "mm_tokens_per_image": 256},
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 896, "width": 896}},
        {"image_seq_length": 256},
    ),
}


def _real(name: str) -> ImageProcessing:
    return processing_of(*REAL[name])


def _anyres(file: str, processor: str, pinpoints: list[list[int]], **attributes: Any) -> Callable[[int, int], int]:
    """Return the method of LLaVA-NeXT's processor, or of one like it."""
    found = getattr(module_of("processing", file), processor)
    stand_in = SimpleNamespace(image_processor=SimpleNamespace(image_grid_pinpoints=pinpoints), **attributes)
    stand_in._get_unpadded_features = found._get_unpadded_features.__get__(stand_in)
    side = 336 if file == "llava_next" else 384
    return lambda height, width: int(found._get_number_of_features(stand_in, height, width, side, side))


def _qwen(patch: int, low: int, high: int) -> Callable[[int, int], int]:
    process = module_of("image_processing_pil", "qwen2_vl").Qwen2VLImageProcessorPil(patch_size=patch)
    bounds = {"min_pixels": low, "max_pixels": high}
    return lambda height, width: int(process.get_number_of_image_patches(height, width, bounds)) // 4


def _internvl(height: int, width: int) -> int:
    process = module_of("image_processing_pil", "got_ocr2").GotOcr2ImageProcessorPil(size={"height": 448, "width": 448})
    return 256 * int(process.get_number_of_image_patches(height, width, {"crop_to_patches": True}))


def _idefics(longest: int, tile: int, rows: int) -> Callable[[int, int], int]:
    """Return the rows of the tiles that the library cuts, of pictures of which there is only the size."""
    file = module_of("image_processing_pil", "idefics3")

    def resize(_image: Any, size: Any, **_others: Any) -> Any:
        return _empty(size.height, size.width)

    def counted(height: int, width: int) -> int:
        stand_in: Any = SimpleNamespace(resize=resize)
        first = _empty(*file.get_resize_output_image_size(_empty(height, width), longest))
        image = file.Idefics3ImageProcessorPil.resize_for_vision_encoder(stand_in, first, tile)
        frames, *_ = file.Idefics3ImageProcessorPil.split_images(stand_in, image, {"longest_edge": tile})
        return rows * len(frames)

    return counted


def _mistral(height: int, width: int) -> int:
    file = module_of("image_processing_pil", "pixtral")
    down, across = file.get_resize_output_image_size(_empty(height, width), 1540, 28, "channels_first")
    return int(down // 28) * int(across // 28)


def _empty(height: int, width: int) -> Any:
    """Return a picture of a size without storage."""
    return np.broadcast_to(np.uint8(0), (3, height, width))


FORMULAS: Mapping[str, Callable[[int, int], int]] = {
    "gemma3": lambda _height, _width: 256,
    "idefics3": _idefics(5000, 364, 169),
    "internvl": _internvl,
    "llava": lambda height, width: 576 if max(height, width) < min(height, width) * 1188 else 0,  # of MAX_CANVAS
    "llava_next": _anyres("llava_next", "LlavaNextProcessor", _NEXT, patch_size=14, num_additional_image_tokens=0),
    "llava_onevision": _anyres(
        *("llava_onevision", "LlavaOnevisionProcessor", _ONEVISION),
        num_image_tokens=729,
        vision_aspect_ratio="anyres_max_9",
    ),
    "mistral3": _mistral,
    "qwen2_vl": _qwen(14, 3136, 12845056),
    "qwen3_vl": _qwen(16, 65536, 16777216),
    "smolvlm": _idefics(2048, 512, 64),
}
"""Rows of an image of some height and width."""

EACH_REAL = pytest.mark.parametrize("name", sorted(FORMULAS))
SIDES = st.integers(1, 300) | st.integers(1, 6000) | st.sampled_from([336, 384, 448, 512, 672, 896, 1540, 4096])


@EACH_REAL
@settings(max_examples=80, deadline=None, derandomize=True)
@given(height=SIDES, width=SIDES)
def test_rows_of_images_of_any_size(name: str, height: int, width: int) -> None:
    """As many as the library counts, and as the pieces of the text have in all; what it refuses is refused."""
    processing, wanted = _real(name), _or_none(FORMULAS[name], height, width)
    rows = _or_none(lambda *size: processing.rows(size), height, width)
    assert rows == wanted
    if rows is not None:
        assert rows == sum(piece for piece in processing.pattern((height, width)) if isinstance(piece, int))
        grid = processing.grid((height, width))
        assert grid is None or grid[1] * grid[2] == rows


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *(
            ("llava_next", (55, 176)),
            ("llava_next", (88, 55)),
        ),  # floats a little below a whole number
        *(("llava_onevision", (47, 423)), ("llava_onevision", (423, 47))),
        ("llava_onevision", (1152, 1200)),  # hardly more rows than nine tiles have
        ("mistral3", (1545, 900)),  # hardly larger than the longest side
    ],
)
def test_rows_of_images_at_bounds(name: str, size: tuple[int, int]) -> None:
    """As the library rounds, and from where on it shrinks."""
    assert _real(name).rows(size) == FORMULAS[name](*size)


def _or_none(rows: Callable[[int, int], int], height: int, width: int) -> int | None:
    """Return rows, or None where the size is refused, or leaves nothing of a side."""
    try:
        return rows(height, width) or None
    except ValueError:
        return None


@pytest.mark.parametrize("name", sorted(FOLDERS))
@settings(max_examples=8, deadline=None, derandomize=True)
@given(height=st.integers(1, 130), width=st.integers(1, 130))
def test_pixels_of_images_of_any_size(name: str, height: int, width: int) -> None:
    """They are the library's to the bit, and as many pictures as rows need; it fails where a size is refused."""
    processing, image = FOLDERS[name].processing(), picture((height, width))
    try:
        item = processing.prepare(image)
    except ValueError:
        with pytest.raises(ValueError, match=r"SizeDict\((height=0|height=\d+, width=0)"):
            library_inputs(name, [image])
        return
    found = processing.collate([item], [(height, width)])["pixel_values"]
    wanted = library_inputs(name, [image])["pixel_values"]
    assert torch.equal(found, wanted[0] if processing.kind in {"tiles", "onevision"} else wanted)


WIDE, TALL = (1, 1_000_000), (1_000_000, 1)
_LARGE = "more than 134,217,728 pixels in all"
REFUSED = {
    ("gemma3", TALL): f"becomes 1000000 x 896, {_LARGE}",
    ("internvl", TALL): f"becomes 1000000 x 448, {_LARGE}",
    ("llava", TALL): f"becomes 1000000 x 336, {_LARGE}",
    ("llava", WIDE): f"becomes 1 x 336000000, {_LARGE}",
    ("llava_next", TALL): f"becomes 1000000 x 336, {_LARGE}",
    ("llava_onevision", TALL): f"becomes 1000000 x 384, {_LARGE}",
    ("mistral3", TALL): "becomes 1539 x 0, which has no pixel",
    ("mistral3", WIDE): "becomes 0 x 1539, which has no pixel",
    ("qwen2_vl", TALL): "has one side more than 200 times as long as the other",
    ("qwen2_vl", WIDE): "has one side more than 200 times as long as the other",
    ("qwen3_vl", TALL): "has one side more than 200 times as long as the other",
    ("qwen3_vl", WIDE): "has one side more than 200 times as long as the other",
}


@EACH_REAL
@pytest.mark.parametrize("size", [WIDE, TALL], ids=["wide", "tall"])
def test_lines_of_a_million_pixels(name: str, size: tuple[int, int]) -> None:
    """They are refused by their size alone, before anything is allocated, or become no more than other images do."""
    processing, image = _real(name), Image.new("L", size[::-1], 9)
    if (name, size) in REFUSED:
        text = f"^an image of {size[0]} x {size[1]} pixels \\(height x width\\) {REFUSED[name, size]}$"
        for refuse in (lambda: processing.rows(size), lambda: processing.prepare(image)):
            with pytest.raises(ValueError, match=text):
                refuse()
    else:
        assert processing.rows(size) < 2**14
        assert processing.prepare(image)["pixels"].numel() < 2**25


def test_an_image_of_more_pixels_than_any_may_have_is_refused() -> None:
    """Also where it would be shrunk, as before that it has to be held."""
    with pytest.raises(ValueError, match=f"becomes 50000 x 50000, {_LARGE}$"):
        _real("qwen3_vl").rows((50_000, 50_000))
    with pytest.raises(ValueError, match=f"becomes 50000 x 50000, {_LARGE}$"):
        FOLDERS["llava padded"].processing().rows((9, 50_000))
