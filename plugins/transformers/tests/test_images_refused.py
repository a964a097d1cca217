"""What of published folders and of settings is refused, by file and key or by field, with what would be right."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any

import attrs
import pytest
from published_folder import Folder
from published_images import FOLDERS

from mimo.hooks import ConfigError


def _changed(name: str, file: str, changes: Mapping[str, Any]) -> Folder:
    return attrs.evolve(FOLDERS[name], **{file: {**getattr(FOLDERS[name], file), **changes}})


_PREPROCESSOR, _PROCESSOR = "preprocessor_config.json", "processor_config.json"
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    (
        *("gemma3", "preprocessor", {"do_pan_and_scan": True}),
        f"{_PREPROCESSOR}: do_pan_and_scan: expected false, as further crops of an image aren't made here, got True",
    ),
    (
        *("glm4v", "preprocessor", {"size": {"shortest_edge": 512, "longest_edge": 4097}}),
        f"{_PREPROCESSOR}: size.longest_edge: expected a whole number of pixels for each of 2 frames, got 4097",
    ),
    (
        *("glmga", "preprocessor", {"patch_expand_factor": 2}),
        f"{_PREPROCESSOR}: patch_expand_factor: expected 1, as larger rows aren't made here, got 2",
    ),
    (
        *("got_ocr2", "preprocessor", {"crop_to_patches": True}),
        f"{_PREPROCESSOR}: crop_to_patches: expected False, as further tiles of an image aren't made here, got True",
    ),
    (
        *("deepseek_vl", "preprocessor", {"do_pad": False}),
        f"{_PREPROCESSOR}: do_pad: expected True, as images must all have one size, got False",
    ),
    (
        *("deepseek_vl", "preprocessor", {"min_size": 17}),
        f"{_PREPROCESSOR}: min_size: expected a whole number from 1 to 16, got 17",
    ),
    (
        *("llava_next", "preprocessor", {"image_processor_type": "FuyuImageProcessor"}),
        f"{_PREPROCESSOR}: image_processor_type: expected one of LlavaNextImageProcessor for a model of",
    ),
    (
        *("llava", "preprocessor", {"do_resize": False}),
        f"{_PREPROCESSOR}: do_resize: expected true, as images have any size, got False",
    ),
    (
        *("llava", "preprocessor", {"do_center_crop": False}),
        f"{_PREPROCESSOR}: do_center_crop: expected true, or height and width in size, as images must",
    ),
    (
        *("llava", "preprocessor", {"do_pad": True}),
        f"{_PREPROCESSOR}: do_pad: expected false, as this image processor pads no image to a square, got True",
    ),
    (
        *("llava padded", "preprocessor", {"do_normalize": False}),
        f"{_PREPROCESSOR}: do_pad: expected false, as there is no mean colour without do_normalize, got True",
    ),
    (
        *("llava", "preprocessor", {"size": {"longest_edge": 336}}),
        f"{_PREPROCESSOR}: size: expected height and width, got {{'longest_edge': 336}}",
    ),
    (
        *("llava", "preprocessor", {"crop_size": {"height": 16, "width": "16"}}),
        f"{_PREPROCESSOR}: crop_size.width: expected a whole number from 1 to 32768, got '16'",
    ),
    (
        *("llava", "preprocessor", {"resample": 9}),
        f"{_PREPROCESSOR}: resample: expected a whole number from 0 to 5, got 9",
    ),
    (
        *("llava", "preprocessor", {"image_std": [0.5, 0.0, 0.5]}),
        f"{_PREPROCESSOR}: image_std: expected 3 numbers above 0, got [0.5, 0.0, 0.5]",
    ),
    (
        *("llava", "preprocessor", {"image_mean": 0.5}),
        f"{_PREPROCESSOR}: image_mean: expected a list of numbers, got 0.5",
    ),
    (
        *("llava", "preprocessor", {"rescale_factor": float("nan")}),
        f"{_PREPROCESSOR}: rescale_factor: expected a finite number above 0, got nan",
    ),
    (
        *("llava", "processor", {"patch_size": 16}),
        f"{_PROCESSOR}: patch_size: expected 4, as config.json says in vision_config.patch_size, got 16",
    ),
    (
        *("llava", "config", {"vision_feature_select_strategy": "full"}),
        "config.json: vision_feature_select_strategy: expected 'default', as processor_config.json says",
    ),
    (
        *("llava", "processor", {"vision_feature_select_strategy": "some"}),
        f"{_PROCESSOR}: vision_feature_select_strategy: expected 'default' or 'full', got 'some'",
    ),
    (
        *("llava", "processor", {"num_additional_image_tokens": 0}),
        f"{_PROCESSOR}: vision_feature_select_strategy: expected 'full', as the tower has no row before",
    ),
    (
        *("llava padded", "config", {"vision_config": {"patch_size": 4, "model_type": "unheard"}}),
        f"{_PROCESSOR}: num_additional_image_tokens: expected how many rows a tower of type 'unheard' has before those",
    ),
    (
        *("llava padded", "config", {"vision_config": {"model_type": "siglip_vision_model"}}),
        f"{_PROCESSOR}: patch_size: expected a whole number from 1 to 1024, got nothing",
    ),
    (
        *("llava_next", "preprocessor", {"crop_size": {"height": 8, "width": 8}}),
        f"{_PREPROCESSOR}: size.shortest_edge: expected {{'height': 8, 'width': 8}}, as {_PREPROCESSOR} says in crop",
    ),
    (
        *("llava_next", "preprocessor", {"image_grid_pinpoints": [[16, 32]]}),
        f"{_PREPROCESSOR}: image_grid_pinpoints: expected [[16, 32], [32, 16], [32, 32], [48, 16], [16, 48]], as",
    ),
    (
        *("llava_onevision", "processor", {"vision_aspect_ratio": "anyres"}),
        f"{_PROCESSOR}: vision_aspect_ratio: expected 'anyres_max_9', as config.json says in vision_aspect_ratio",
    ),
    (
        *("llava_onevision", "processor", {"num_image_tokens": 17}),
        f"{_PROCESSOR}: num_image_tokens: expected 16, as tiles of 16 pixels have in patches of 4, got 17",
    ),
    (
        *("llava_onevision", "processor", {"vision_feature_select_strategy": "default"}),
        f"{_PROCESSOR}: vision_feature_select_strategy: expected 'full', as tiles are put together of all their rows",
    ),
    (
        *("qwen2_vl", "preprocessor", {"max_pixels": 1 << 28}),
        f"{_PREPROCESSOR}: max_pixels: expected a whole number from 1 to 134217728, got 268435456",
    ),
    (
        *("qwen2_vl", "preprocessor", {"merge_size": 4}),
        f"{_PREPROCESSOR}: merge_size: expected 2, as config.json says in vision_config.spatial_merge_size, got 4",
    ),
    (
        *("qwen3_vl", "preprocessor", {"size": {"height": 64, "width": 64}}),
        f"{_PREPROCESSOR}: size.shortest_edge: expected a whole number from 1 to 134217728, got nothing",
    ),
    (
        *("internvl", "preprocessor", {"size": {"height": 16, "width": 32}}),
        f"{_PREPROCESSOR}: size: expected [16, 16], as config.json says in vision_config.image_size",
    ),
    (
        *("internvl", "preprocessor", {"max_patches": 100_000}),
        f"{_PREPROCESSOR}: max_patches: expected a whole number from 1 to 256, got 100000",
    ),
    (
        *("smolvlm", "preprocessor", {"size": {"height": 64, "width": 64}}),
        f"{_PREPROCESSOR}: size.longest_edge: expected a whole number from 1 to 32768, got nothing",
    ),
    (
        *("mistral3", "processor", {"spatial_merge_size": 1}),
        f"{_PROCESSOR}: spatial_merge_size: expected 2, as config.json says in spatial_merge_size, got 1",
    ),
    (
        *("mistral3", "processor", {"image_break_token": 12}),
        f"{_PROCESSOR}: image_break_token: expected a text, got 12",
    ),
]


@pytest.mark.parametrize(("name", "file", "changes", "text"), REFUSED)
def test_what_can_not_be_done_is_refused(name: str, file: str, changes: dict[str, Any], text: str) -> None:
    """By file and key, with what would be right."""
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}"):
        _changed(name, file, changes).processing()


JUNK: tuple[Any, ...] = (
    -1,
    0,
    2.5,
    10**30,
    True,
    "",
    "1" * 9,
    [],
    [1],
    [[1, 2]],
    [None, 2],
    {},
    {"height": 1},
    {"shortest_edge": "x"},
)


@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_no_value_of_a_key_ends_in_another_error(name: str) -> None:
    """Whatever stands in a file is read or refused as a setting is."""
    for file in ("config", "preprocessor", "processor"):
        keys = getattr(FOLDERS[name], file)
        for changes in [{key: value} for key in keys for value in JUNK]:
            with contextlib.suppress(ConfigError):
                processing = _changed(name, file, changes).processing()
                assert processing.rows((64, 64)) > 0


def test_a_file_inside_of_another_is_named() -> None:
    """With both names."""
    inside = attrs.evolve(FOLDERS["gemma3"], preprocessor={}, processor={"image_processor": {"do_pan_and_scan": True}})
    with pytest.raises(ConfigError, match=r"^processor_config.json: image_processor: do_pan_and_scan: expected false"):
        inside.processing()


SETTINGS: list[tuple[str, dict[str, Any], str]] = [
    ("llava", {"marker": ""}, "marker: expected a text, got ''"),
    ("llava", {"rescale": 0.0}, "rescale: expected a finite number above 0, got 0.0"),
    ("llava", {"mean": (0.5,)}, "mean: expected 3 numbers, got (0.5,)"),
    ("llava", {"std": (0.5, 0.5, 0.0)}, "std: expected 3 numbers above 0, got (0.5, 0.5, 0.0)"),
    ("llava", {"resample": "cubic"}, "resample: expected one of nearest, lanczos, bilinear, bicubic, box, hamming"),
    ("llava", {"resize": (0,)}, "resize: expected 1 or 2 numbers from 1 to 32768, got (0,)"),
    ("llava", {"crop": (1 << 16, 1)}, "crop: expected 0 or 2 numbers from 1 to 32768, got (65536, 1)"),
    (
        "llava",
        {"crop": ()},
        "crop: expected height and width, as only the shorter side of an image is resized",
    ),
    ("llava", {"image_rows": 0}, "image_rows: expected 1 to 16777216, got 0"),
    ("llava_next", {"class_rows": -1}, "class_rows: expected 0 to 4096, got -1"),
    ("llava_next", {"patch": 17}, "patch: expected at most tile = 16, got 17"),
    ("llava_next", {"resolutions": ()}, "resolutions: expected one resolution or more, got ()"),
    (
        *("llava_next", {"resolutions": ((16, 18),)}),
        "resolutions: expected heights and widths of whole tiles of 16 pixels, less than 256 tiles, got [16, 18]",
    ),
    (
        *("llava_onevision", {"resolutions": ((16 * 16, 16 * 16),)}),
        "resolutions: expected heights and widths of whole tiles of 16 pixels, less than 256 tiles, got [256, 256]",
    ),
    ("llava_onevision", {"max_tiles": 257}, "max_tiles: expected 1 to 256, got 257"),
    ("qwen2_vl", {"max_pixels": 255}, "max_pixels: expected at least 256, got 255"),
    ("qwen2_vl", {"min_pixels": 1, "max_pixels": 63}, "max_pixels: expected at least 64, got 63"),
    ("internvl", {"min_tiles": 7}, "min_tiles: expected at most max_tiles = 6, got 7"),
    ("idefics3", {"tile": 4}, "tile: expected a side in pixels that leaves less than 256 tiles of 64 pixels squared"),
    (
        *("idefics3", {"mean": (0.0, 1.0, 0.0)}),
        "mean: expected numbers of which no colour becomes 0 throughout, as the model takes such tiles for padding",
    ),
    ("deepseek_vl", {"least": 17}, "least: expected at most side = 16, got 17"),
    ("glm4v", {"enlarge": "up"}, "enlarge: expected no, cut or rounded, got 'up'"),
    ("mistral3", {"patch": 1025}, "patch: expected 1 to 1024, got 1025"),
]


@pytest.mark.parametrize(("name", "changes", "text"), SETTINGS)
def test_settings_out_of_range_are_refused(name: str, changes: dict[str, Any], text: str) -> None:
    """By field, before an image is seen."""
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}"):
        attrs.evolve(FOLDERS[name].processing(), **changes)
