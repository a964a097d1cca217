"""What keys of published image processors mean that a folder leaves out, as the library's classes have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CLIP = {
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
    "resample": 3,
}
_HALF = {"image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5), "resample": 3}
_USUAL = {"do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255}
_COVERED = {
    "size": {"shortest_edge": 224},
    "crop_size": {"height": 224, "width": 224},
    "do_center_crop": True,
    "default_to_square": False,
}


def _square(side: int) -> Mapping[str, int]:
    return {"height": side, "width": side}


PLAIN: Mapping[str, Mapping[str, Any]] = {
    "BitImageProcessor": {**_USUAL, **_CLIP, **_COVERED},
    "BlipImageProcessor": {**_USUAL, **_CLIP, "size": _square(384), "default_to_square": True},
    "CLIPImageProcessor": {**_USUAL, **_CLIP, **_COVERED},
    "ChineseCLIPImageProcessor": {**_USUAL, **_CLIP, **_COVERED},
    "DeiTImageProcessor": {**_USUAL, **_HALF, **_COVERED, "size": _square(256), "default_to_square": True},
    "LlavaImageProcessor": {**_USUAL, **_CLIP, **_COVERED, "do_pad": False},
    "SiglipImageProcessor": {**_USUAL, **_HALF, "size": _square(224), "default_to_square": False},
    "ViTImageProcessor": {**_USUAL, **_HALF, "size": _square(224), "default_to_square": True, "resample": 2},
}
"""Image processors that resize, cut and scale, and nothing else."""

_PINPOINTS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
_QWEN = {
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
_IDEFICS = {
    "size": {"longest_edge": 4 * 364},
    "max_image_size": {"longest_edge": 364},
    "do_image_splitting": True,
    "resample": 1,
}
_GLM = {
    **_QWEN,
    "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000},
}
_STEPS = range(384, 2305, 384)
_SQUARED = {**_USUAL, **_CLIP, "size": _square(384), "min_size": 14, "do_pad": True}
OTHERS: Mapping[str, Mapping[str, Any]] = {
    "DeepseekVLImageProcessor": _SQUARED,
    "Gemma3ImageProcessor": {**_USUAL, **_HALF, "size": _square(224), "default_to_square": True, "resample": 2},
    "Glm46VImageProcessor": {**_USUAL, **_CLIP, **_GLM},
    "Glm4vImageProcessor": {**_USUAL, **_CLIP, **_GLM},
    "GlmgaImageProcessor": {**_USUAL, **_CLIP, **_GLM},
    "GotOcr2ImageProcessor": {**_USUAL, **_CLIP, "size": _square(384), "min_patches": 1, "max_patches": 12},
    "Idefics3ImageProcessor": {**_USUAL, **_HALF, **_IDEFICS},
    "JanusImageProcessor": _SQUARED,
    "LlavaNextImageProcessor": {**_USUAL, **_CLIP, **_COVERED, "image_grid_pinpoints": _PINPOINTS},
    "LlavaOnevisionImageProcessor": {
        **_USUAL,
        **_CLIP,
        "size": _square(384),
        "default_to_square": False,
        "image_grid_pinpoints": tuple((down, across) for down in _STEPS for across in _STEPS),
    },
    "PaddleOCRVLImageProcessor": {
        **_USUAL,
        **_CLIP,
        **_QWEN,
        "size": {"shortest_edge": 384 * 384, "longest_edge": 1536 * 1536},
        "temporal_patch_size": 1,
    },
    "PixtralImageProcessor": {**_USUAL, **_CLIP, "size": {"longest_edge": 1024}},
    "Qwen2VLImageProcessor": {**_USUAL, **_CLIP, **_QWEN},
    "Qwen2_5_VLImageProcessor": {**_USUAL, **_CLIP, **_QWEN},
    "SmolVLMImageProcessor": {**_USUAL, **_HALF, **_IDEFICS},
    "VideoLlama3ImageProcessor": {**_USUAL, **_HALF, **_QWEN, "temporal_patch_size": 1, "merge_size": 1},
}
"""Those of the other kinds."""
