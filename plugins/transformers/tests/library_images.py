"""What the library itself makes of images: its image processors, and its processors of texts without torchvision."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
from PIL import Image
from published_images import FOLDERS


def module_of(kind: str, name: str) -> ModuleType:
    """Return a file of the library, ``image_processing_pil`` or ``processing`` of a model type."""
    return importlib.import_module(f"transformers.models.{name}.{kind}_{name}")


_FILES = {
    "CLIP": "clip",
    "DeepseekVL": "deepseek_vl",
    "Glm46V": "glm46v",
    "Glm4v": "glm4v",
    "Llava": "llava",
    "LlavaNext": "llava_next",
    "LlavaOnevision": "llava_onevision",
    "Qwen2VL": "qwen2_vl",
    "Janus": "janus",
    "PaddleOCRVL": "paddleocr_vl",
    "VideoLlama3": "video_llama_3",
    "Glmga": "glmga",
    "GotOcr2": "got_ocr2",
    "Gemma3": "gemma3",
    "Idefics3": "idefics3",
    "SmolVLM": "smolvlm",
    "Pixtral": "pixtral",
    "Siglip": "siglip",
}


def library_processor(name: str) -> Any:
    """Return the library's image processor of a folder."""
    given = {key: value for key, value in FOLDERS[name].preprocessor.items() if value is not None}
    kind = str(given.pop("image_processor_type")).removesuffix("Fast").removesuffix("ImageProcessor")
    return getattr(module_of("image_processing_pil", _FILES[kind]), f"{kind}ImageProcessorPil")(**given)


def library_inputs(name: str, images: list[Image.Image]) -> dict[str, Any]:
    """Return what it makes of images, with what the folder's processor of texts adds to the call."""
    processor, added = FOLDERS[name].processor, {}
    if name in {"aya_vision", "internvl"}:
        added = {"crop_to_patches": True}
    if name in {"idefics3", "smolvlm"}:
        added = {"return_row_col_info": True}
    if FOLDERS[name].processing().kind == "native":
        added = {"patch_size": processor["patch_size"] * processor.get("spatial_merge_size", 1)}
    return dict(library_processor(name)(images, return_tensors="pt", **added))


@contextmanager
def torchvision_by_name() -> Iterator[None]:
    """Let files of the library import torchvision, of which their processors of texts use nothing."""
    names = [f"torchvision{rest}" for rest in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional")]
    *_, parent, functional = names
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setitem(sys.modules, name, ModuleType(name))
        patch.setattr(sys.modules[parent], "functional", sys.modules[functional], raising=False)
        before = set(sys.modules)
        yield
        for name in set(sys.modules) - before:
            del sys.modules[name]  # or others would find what was imported beside the stand-in
