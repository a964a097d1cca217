"""What stands in a text for one image, as the library's own processors of texts put it there."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from library_images import library_inputs, library_processor, module_of, torchvision_by_name
from published_folder import PATCH, TILE
from published_images import EACH, FOLDERS, SIZES, picture
from small_models import known

from mimo_transformers.images import PARITY

_CLASSES = {
    "llava": ("llava", "LlavaProcessor"),
    "llava padded": ("llava", "LlavaProcessor"),
    "llava pixtral": ("pixtral", "PixtralProcessor"),
    "llava_next": ("llava_next", "LlavaNextProcessor"),
    "llava_onevision": ("llava_onevision", "LlavaOnevisionProcessor"),
    "qwen2_vl": ("qwen2_vl", "Qwen2VLProcessor"),
    "qwen2_5_vl": ("qwen2_5_vl", "Qwen2_5_VLProcessor"),
    "qwen3_vl": ("qwen3_vl", "Qwen3VLProcessor"),
    "qwen3_vl_moe": ("qwen3_vl", "Qwen3VLProcessor"),
    "internvl": ("internvl", "InternVLProcessor"),
    "gemma3": ("gemma3", "Gemma3Processor"),
    "vipllava": ("llava", "LlavaProcessor"),
    "idefics3": ("idefics3", "Idefics3Processor"),
    "smolvlm": ("smolvlm", "SmolVLMProcessor"),
    "mistral3": ("pixtral", "PixtralProcessor"),
    "aya_vision": ("aya_vision", "AyaVisionProcessor"),
    "deepseek_vl": ("deepseek_vl", "DeepseekVLProcessor"),
    "exaone4_5": ("exaone4_5", "Exaone4_5_Processor"),
    "glm4v": ("glm4v", "Glm4vProcessor"),
    "glm4v_moe": ("glm4v", "Glm4vProcessor"),
    "glm46v": ("glm46v", "Glm46VProcessor"),
    "glm_ocr": ("glm46v", "Glm46VProcessor"),
    "glmga": ("glm46v", "Glm46VProcessor"),
    "hyperclovax_vision_v2": ("hyperclovax_vision_v2", "HyperCLOVAXVisionV2Processor"),
    "lfm3_vl": ("lfm3_vl", "Lfm3VlProcessor"),
    "lighton_ocr": ("lighton_ocr", "LightOnOcrProcessor"),
    "got_ocr2": ("got_ocr2", "GotOcr2Processor"),
    "janus": ("janus", "JanusProcessor"),
    "llava_next_video": ("llava_next_video", "LlavaNextVideoProcessor"),
    "paddleocr_vl": ("paddleocr_vl", "PaddleOCRVLProcessor"),
    "video_llama_3": ("video_llama_3", "VideoLlama3Processor"),
    "qwen3_5": ("qwen3_vl", "Qwen3VLProcessor"),
    "qwen3_5_moe": ("qwen3_vl", "Qwen3VLProcessor"),
}
_TOKENS: dict[str, dict[str, Any]] = {
    "aya_vision": {
        "start_of_img_token": "<|START_OF_IMG|>",
        "end_of_img_token": "<|END_OF_IMG|>",
        "tile_token": "TILE",
        "tile_global_token": "TILE_GLOBAL",
        "img_patch_token": "<|IMG_PATCH|>",
        "patch_size": 2 * PATCH,
    },
    "deepseek_vl": {"image_token": "<image_placeholder>"},
    "gemma3": {"full_image_sequence": f"\n\n<start_of_image>{'<image_soft_token>' * 4}<end_of_image>\n\n"},
    "janus": {
        "image_token": "<image_placeholder>",
        "image_start_token": "<begin_of_image>",
        "image_end_token": "<end_of_image>",
    },
    "got_ocr2": {"image_token": "<imgpad>"},
    "hyperclovax_vision_v2": {"image_token": "<|IMAGE_PAD|>"},
    "idefics3": {"fake_image_token": "<fake_token_around_image>", "global_image_tag": "<global-img>"},
    "internvl": {"start_image_token": "<img>", "end_image_token": "</img>", "image_token": "<IMG_CONTEXT>"},
    "lighton_ocr": {"image_token": "<|image_pad|>", "effective_patch_size": 8},
    "llava padded": {"patch_size": PATCH, "num_additional_image_tokens": 0, "vision_feature_select_strategy": "full"},
    "mistral3": {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
    "qwen2_vl": {"image_token": "<|image_pad|>"},
    "paddleocr_vl": {"image_token": "<|IMAGE_PLACEHOLDER|>"},
    "smolvlm": {"fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>"},
}
_TOKENS |= {"llava pixtral": {"spatial_merge_size": 1, **_TOKENS["mistral3"]}}
_TOKENS |= dict.fromkeys(
    ("exaone4_5", "lfm3_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "video_llama_3"),
    _TOKENS["qwen2_vl"],
)
_TOKENS |= {name: {"image_token": "<|image|>"} for name in ("glm4v", "glm4v_moe", "glm46v", "glm_ocr", "glmga")}


def _written(name: str, inputs: Mapping[str, Any], index: int) -> str:
    """Return what the library's processor of a folder writes, of which there is only what its method looks up."""
    if name == "paligemma":  # whose processor has no method for one image: a formula, beside methods for its kind
        return "<image>" * int(FOLDERS[name].preprocessor["image_seq_length"])
    with torchvision_by_name():
        file, class_name = _CLASSES[name]
        processor = getattr(module_of("processing", file), class_name)
    attributes = {"image_token": "<image>", **FOLDERS[name].processor, **_TOKENS.get(name, {})}
    stand_in = SimpleNamespace(**attributes, image_processor=library_processor(name))
    for method in ("_get_number_of_features", "_get_unpadded_features"):
        if hasattr(processor, method):
            setattr(stand_in, method, getattr(processor, method).__get__(stand_in))
    pages = {"num_pages_per_batch": [1], "num_image_tokens": attributes.get("num_image_tokens"), "patch_indices": [0]}
    return str(processor.replace_image_token(stand_in, inputs, index, **pages))


@EACH
def test_a_marker_becomes_what_the_library_writes(name: str) -> None:
    """For each size: placeholders as often as there are rows, and other tokens where the library has them."""
    known(FOLDERS[name].config["model_type"])
    processing = FOLDERS[name].processing()
    assert PARITY[processing.kind]["text"] == "method"
    for size in SIZES:
        inputs = library_inputs(name, [picture(size)])
        assert processing.text(size) == _written(name, inputs, 0)
        assert processing.text(size).count(processing.placeholder) == processing.rows(size)


def test_patterns_name_what_stands_between_rows() -> None:
    """Whole numbers are rows; texts are tokens between them."""
    wanted: dict[str, tuple[str | int, ...]] = {
        "llava": (16,),
        "mistral3": (4, "[IMG_BREAK]", 4, "[IMG_BREAK]", 4, "[IMG_END]"),
        "smolvlm": (
            *("<fake_token_around_image><row_1_col_1>", 4, "<fake_token_around_image><row_1_col_2>", 4),
            *("<fake_token_around_image><row_1_col_3>", 4, "<fake_token_around_image><row_1_col_4>", 4),
            *("\n<fake_token_around_image><row_2_col_1>", 4, "<fake_token_around_image><row_2_col_2>", 4),
            *("<fake_token_around_image><row_2_col_3>", 4, "<fake_token_around_image><row_2_col_4>", 4),
            *("\n<fake_token_around_image><row_3_col_1>", 4, "<fake_token_around_image><row_3_col_2>", 4),
            *("<fake_token_around_image><row_3_col_3>", 4, "<fake_token_around_image><row_3_col_4>", 4),
            *("\n\n<fake_token_around_image><global-img>", 4, "<fake_token_around_image>"),
        ),
    }
    for name, pattern in wanted.items():
        assert FOLDERS[name].processing().pattern((20, 32)) == pattern


def test_an_image_that_is_one_tile_has_no_name() -> None:
    """As where images aren't split."""
    from attrs import evolve

    whole = ("<fake_token_around_image><global-img>", 4, "<fake_token_around_image>")
    folder = evolve(FOLDERS["idefics3"], preprocessor={**FOLDERS["idefics3"].preprocessor, "do_image_splitting": False})
    assert folder.processing().pattern((200, 90)) == whole
    small = {**FOLDERS["idefics3"].preprocessor, "size": {"longest_edge": TILE}}
    assert evolve(folder, preprocessor=small).processing().pattern((200, 200)) == whole


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_rows_lie_in_a_grid(name: str) -> None:
    """Which positions of the language model follow; of the other kinds they follow one another."""
    processing = FOLDERS[name].processing()
    for size in SIZES:
        grid = processing.grid(size)
        wanted = library_inputs(name, [picture(size)])["image_grid_thw"][0].tolist()
        assert grid is not None
        assert [grid[0], grid[1] * 2, grid[2] * 2] == wanted
    assert FOLDERS["llava"].processing().grid((3, 4)) is None
