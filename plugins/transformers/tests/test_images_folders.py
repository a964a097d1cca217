"""What files of published folders mean, and what is refused of them, by file and key."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import attrs
import pytest
from library_images import module_of
from published_images import EACH, FOLDERS, picture

from mimo.hooks import ConfigError
from mimo_transformers.image_files.defaults import OTHERS, PLAIN
from mimo_transformers.images import KINDS, PARITY

_FILES = {"CLIP": "clip", "ChineseCLIP": "chinese_clip", "DeiT": "deit", "GotOcr2": "got_ocr2", "Qwen2VL": "qwen2_vl"}
_FILES |= {"DeepseekVL": "deepseek_vl", "PaddleOCRVL": "paddleocr_vl", "VideoLlama3": "video_llama_3"}
_FILES |= {"LlavaNext": "llava_next", "LlavaOnevision": "llava_onevision"}


@EACH
def test_settings_are_plain_values(name: str) -> None:
    """Numbers, texts, true and false and lists of these, from which the same settings are made again."""
    processing = FOLDERS[name].processing()
    values = attrs.asdict(processing)
    assert all(_is_plain(value) for value in values.values())
    assert KINDS[processing.kind](**values) == processing


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, str | int | float | bool)


@EACH
def test_the_table_inside_of_the_processors_file_is_read(name: str) -> None:
    """Whether the folder has a file of the image processor beside it or not."""
    folder = FOLDERS[name]
    processor = {**folder.processor, "image_processor": folder.preprocessor}
    for preprocessor in ({}, {"image_processor_type": "ViTImageProcessor", "size": 5}):
        inside = attrs.evolve(folder, preprocessor=preprocessor, processor=processor)
        assert inside.processing() == folder.processing()


def test_tokens_of_each_family() -> None:
    """What a chat template writes, the token of a row, and what stands around all of them."""
    found = {name: FOLDERS[name].processing() for name in ("llava", "qwen3_vl", "gemma3", "internvl", "mistral3")}
    assert {name: (one.marker, one.placeholder, one.before, one.after) for name, one in found.items()} == {
        "llava": ("<image>", "<image>", "", ""),
        "qwen3_vl": ("<|image_pad|>", "<|image_pad|>", "", ""),
        "gemma3": ("<start_of_image>", "<image_soft_token>", "\n\n<start_of_image>", "<end_of_image>\n\n"),
        "internvl": ("<IMG_CONTEXT>", "<IMG_CONTEXT>", "<img>", "</img>"),
        "mistral3": ("[IMG]", "[IMG]", "", ""),
    }


def test_every_kind_has_its_parity() -> None:
    """Each is met by a folder of the tests, which look up how parity is shown."""
    assert set(PARITY) == set(KINDS) == {folder.processing().kind for folder in FOLDERS.values()}


def of_library(name: str) -> dict[str, Any]:
    """Return the attributes of the library's class by the keys of the tables."""
    kind = name.removesuffix("ImageProcessor")
    process = getattr(module_of("image_processing_pil", _FILES.get(kind, kind.lower())), f"{name}Pil")
    return {key: _as_lists(getattr(process, key)) for key in {**PLAIN, **OTHERS}[name]}


def _as_lists(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_lists(one) for one in value]
    return dict(value) if isinstance(value, Mapping) else value


# Looked up before any test runs: some processors of older libraries write into what their class has.
LEFT_OUT = {name: of_library(name) for name in sorted({*PLAIN, *OTHERS} - {"Qwen2_5_VLImageProcessor"})}  # it has none


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_is_left_out_means_what_it_means_to_the_library(name: str) -> None:
    """Each key of the tables is an attribute of the library's class."""
    assert {key: _as_lists(value) for key, value in {**PLAIN, **OTHERS}[name].items()} == LEFT_OUT[name]


def test_any_family_with_a_plain_image_processor() -> None:
    """Of a type that is not known, which has to say how many rows an image has; without one it is refused."""
    folder = attrs.evolve(
        FOLDERS["paligemma"],
        config={"model_type": "unheard"},
        preprocessor={"image_processor_type": "ViTImageProcessorFast", "size": 10},
        processor={"image_seq_length": 3, "image_token": "<picture>"},
    )
    processing = folder.processing()
    assert processing.text((5, 7)) == "<picture>" * 3
    assert processing.prepare(picture((5, 7)))["pixels"].shape == (1, 3, 10, 10)
    with pytest.raises(ConfigError, match=r"image_processor_type: expected one of .*ViTImageProcessor.*, got nothing"):
        attrs.evolve(folder, preprocessor={"size": 10}).processing()


def test_rows_are_counted_without_torch() -> None:
    """What looks at a dataset starts fast."""
    code = """
import sys
from mimo_transformers.image_files import processing_of
processing = processing_of({"model_type": "qwen2_vl"}, {"image_processor_type": "Qwen2VLImageProcessor"}, {})
assert processing.rows((280, 560)) == 200
assert not {"torch", "transformers", "torchvision"} & set(sys.modules), sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603 - this interpreter, and the text above
