"""Families of small published folders whose images have nearly their own size, in patches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from published_folder import BOUNDS, JOINED, LARGEST, PATCH, TILE, Family

_SIZE = {"shortest_edge": 2 * TILE**2, "longest_edge": LARGEST**2}
"""Pixels of an image, of two frames, from least to most."""
_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}


def _qwen(model_type: str, kind: str = "Qwen2VLImageProcessorFast") -> Family:
    return Family(model_type=model_type, preprocessor={"image_processor_type": kind, **BOUNDS})


def _sized(model_type: str, kind: str, **others: Any) -> Family:
    preprocessor = {"image_processor_type": kind, **JOINED, "size": _SIZE, **others}
    return Family(model_type=model_type, preprocessor=preprocessor)


def _qwen3(model_type: str) -> Family:
    return _sized(model_type, "Qwen2VLImageProcessorFast", **_HALF)


PATCHED: Mapping[str, Family] = {
    "qwen2_vl": _qwen("qwen2_vl", "Qwen2VLImageProcessor"),
    "qwen2_5_vl": _qwen("qwen2_5_vl"),
    "qwen3_vl": _qwen3("qwen3_vl"),
    "qwen3_vl_moe": _qwen3("qwen3_vl_moe"),
    "qwen3_5": _qwen3("qwen3_5"),
    "qwen3_5_moe": _qwen3("qwen3_5_moe"),
    "exaone4_5": _qwen("exaone4_5"),
    "hyperclovax_vision_v2": _qwen("hyperclovax_vision_v2"),
    "lfm3_vl": _qwen("lfm3_vl"),
    "glm4v": _sized("glm4v", "Glm4vImageProcessorFast"),
    "glm4v_moe": _sized("glm4v_moe", "Glm4vImageProcessorFast"),
    "glm46v": _sized("glm46v", "Glm46VImageProcessorFast"),
    "glm_ocr": _sized("glm_ocr", "Glm46VImageProcessorFast"),
    "glmga": _sized("glmga", "GlmgaImageProcessorFast"),
    "paddleocr_vl": attrs.evolve(
        _sized(
            "paddleocr_vl",
            "PaddleOCRVLImageProcessor",
            temporal_patch_size=1,
            size={"shortest_edge": TILE**2, "longest_edge": LARGEST**2},
        ),
        # Its class turns by three positions and names no sections; published configs do, as here.
        said={"text_config": {"rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]}}},
    ),
    "video_llama_3": Family(
        model_type="video_llama_3",
        preprocessor={
            "image_processor_type": "VideoLlama3ImageProcessor",
            "patch_size": PATCH,
            "size": {"shortest_edge": TILE**2, "longest_edge": (2 * TILE) ** 2},
        },
    ),
}
"""Of each family of theirs."""
