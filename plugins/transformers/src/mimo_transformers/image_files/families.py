"""Which kind a published folder's images are of: the one place that names families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from mimo_transformers.image_files.defaults import OTHERS, PLAIN
from mimo_transformers.image_files.kinds import (
    Reader,
    read_enclosed,
    read_fitted,
    read_fixed,
    read_gemma,
    read_idefics,
    read_internvl,
    read_line_patches,
    read_merged_patches,
    read_named_tiles,
    read_native,
    read_onevision,
    read_patches,
    read_patches_of_frames,
    read_stretched,
    read_tiled,
    read_unbroken,
)
from mimo_transformers.image_files.published import PublishedFolder
from mimo_transformers.images import ImageProcessing

_SUFFIXES = ("Fast", "Pil")
_FIXED: Mapping[str, Reader] = dict.fromkeys(PLAIN, read_fixed)
_PATCHES: Mapping[str, Reader] = dict.fromkeys(("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor"), read_patches)
_IDEFICS: Mapping[str, Reader] = dict.fromkeys(("Idefics3ImageProcessor", "SmolVLMImageProcessor"), read_idefics)


@attrs.frozen
class _Family:
    """How folders of one type prepare images.

    Args:
        usual: the image processor of folders that name none.
        readers: of each image processor that they may name, what reads it.
        token: of one row of an image, where the processor's file says none.
    """

    usual: str
    readers: Mapping[str, Reader]
    token: str = "<image>"  # noqa: S105 - no secret


def _one(name: str, reader: Reader, token: str = "<image>") -> _Family:  # noqa: S107 - no secret
    """Return a family of one image processor."""
    return _Family(name, {name: reader}, token)


_UNKNOWN = _Family("", _FIXED)
_QWEN = _Family("Qwen2VLImageProcessor", _PATCHES, "<|image_pad|>")
_FAMILIES: Mapping[str, _Family] = {
    "aya_vision": _one("GotOcr2ImageProcessor", read_named_tiles, "<|IMG_PATCH|>"),
    "deepseek_vl": _one("DeepseekVLImageProcessor", read_fitted, "<image_placeholder>"),
    "exaone4_5": _QWEN,
    "gemma3": _one("Gemma3ImageProcessor", read_gemma, "<image_soft_token>"),
    "glm46v": _one("Glm46VImageProcessor", read_patches_of_frames, "<|image|>"),
    "glm4v": _one("Glm4vImageProcessor", read_patches_of_frames, "<|image|>"),
    "glm4v_moe": _one("Glm4vImageProcessor", read_patches_of_frames, "<|image|>"),
    "glm_ocr": _one("Glm46VImageProcessor", read_patches_of_frames, "<|image|>"),
    "glmga": _one("GlmgaImageProcessor", read_patches_of_frames, "<|image|>"),
    "got_ocr2": _one("GotOcr2ImageProcessor", read_stretched, "<imgpad>"),
    "hyperclovax_vision_v2": _Family("Qwen2VLImageProcessor", _PATCHES, "<|IMAGE_PAD|>"),
    "idefics3": _Family("Idefics3ImageProcessor", _IDEFICS),
    "internvl": _one("GotOcr2ImageProcessor", read_internvl, "<IMG_CONTEXT>"),
    "janus": _one("JanusImageProcessor", read_enclosed, "<image_placeholder>"),
    "lfm3_vl": _QWEN,
    "lighton_ocr": _one("PixtralImageProcessor", read_unbroken, "<|image_pad|>"),
    "llava": _Family("CLIPImageProcessor", {**_FIXED, "PixtralImageProcessor": read_native}),
    "llava_next": _one("LlavaNextImageProcessor", read_tiled),
    "llava_next_video": _one("LlavaNextImageProcessor", read_tiled),
    "llava_onevision": _one("LlavaOnevisionImageProcessor", read_onevision),
    "mistral3": _one("PixtralImageProcessor", read_native, "[IMG]"),
    "paddleocr_vl": _one("PaddleOCRVLImageProcessor", read_line_patches, "<|IMAGE_PLACEHOLDER|>"),
    "paligemma": _Family("SiglipImageProcessor", _FIXED),
    "qwen2_5_vl": _QWEN,
    "qwen2_vl": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "smolvlm": _Family("SmolVLMImageProcessor", _IDEFICS),
    "video_llama_3": _one("VideoLlama3ImageProcessor", read_merged_patches, "<|image_pad|>"),
    "vipllava": _Family("CLIPImageProcessor", _FIXED),
}
"""By the model's type. A model of another type may name any plain image processor."""


def processing_of(
    described: Mapping[str, Any], preprocessor: Mapping[str, Any], processor: Mapping[str, Any]
) -> ImageProcessing:
    """Return how a published model of images and text prepares an image.

    Args:
        described: its ``config.json``.
        preprocessor: its ``preprocessor_config.json``; empty where the folder has none.
        processor: its ``processor_config.json``, likewise. A table ``image_processor`` in it, as transformers 5 writes
            one, takes the place of the file before, as it does in the library.

    Raises:
        ConfigError: by file and key, where the folder says what isn't known here, or its files disagree.
    """
    folder = PublishedFolder.of(described, preprocessor, processor)
    model_type, key = folder.config["model_type"].value, folder.preprocessor["image_processor_type"]
    family = _FAMILIES.get(model_type if isinstance(model_type, str) else "", _UNKNOWN)
    name = family.usual if key.value is None else key.text()
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    if name not in family.readers:
        raise key.refused(f"one of {', '.join(family.readers)} for a model of type {model_type!r}")
    defaults = {**PLAIN, **OTHERS}[name]
    folder = PublishedFolder(
        config=folder.config, processor=folder.processor, preprocessor=folder.preprocessor.with_defaults(defaults)
    )
    return family.readers[name](folder, family.token)
