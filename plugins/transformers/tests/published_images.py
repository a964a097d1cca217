"""Small published folders of each family of images and text, and pictures of ragged sizes."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from published_folder import COVERED, LARGEST, PATCH, SQUARE, TILE, Family, Folders
from published_patches import PATCHED

_PINPOINTS = [[TILE, 2 * TILE], [2 * TILE, TILE], [2 * TILE, 2 * TILE], [3 * TILE, TILE], [TILE, 3 * TILE]]
_ALL_PINPOINTS = [[down * TILE, across * TILE] for down in range(1, 7) for across in range(1, 7)]
_CLIP = {"image_processor_type": "CLIPImageProcessor", **COVERED}
_DEFAULT = {"patch_size": PATCH, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
"""Of a tower with one row before those of patches, which is left out."""
_NEXT = {
    "image_processor_type": "LlavaNextImageProcessor",
    "image_grid_pinpoints": _PINPOINTS,
    "do_pad": True,
    **COVERED,
}
_PIXTRAL = {
    "image_processor_type": "PixtralImageProcessorFast",
    "size": {"longest_edge": LARGEST},
    "patch_size": PATCH,
}
_HEADLESS = {"model_type": "siglip_vision_model", "vision_use_head": False}
"""As such towers are published in whole models, which read no pooled row."""

FOLDERS = Folders(
    {
        "llava": Family(model_type="llava", preprocessor=_CLIP, processor=_DEFAULT),
        "llava padded": Family(
            model_type="llava",
            said={"vision_config": _HEADLESS, "vision_feature_select_strategy": "full"},
            preprocessor={
                "image_processor_type": "LlavaImageProcessorFast",
                "do_pad": True,
                "size": SQUARE,
                "do_center_crop": False,
            },
        ),
        "llava pixtral": Family(
            model_type="llava",
            said={
                "vision_config": {"model_type": "pixtral"},
                "vision_feature_layer": -1,
                "vision_feature_select_strategy": "full",
            },
            preprocessor={**_PIXTRAL, "image_processor_type": "PixtralImageProcessor"},
            processor={"patch_size": PATCH, "image_token": "[IMG]"},
        ),
        "llava_next": Family(model_type="llava_next", preprocessor=_NEXT, processor=_DEFAULT),
        "llava_next_video": Family(model_type="llava_next_video", preprocessor=_NEXT, processor=_DEFAULT),
        "llava_onevision": Family(
            model_type="llava_onevision",
            said={"vision_aspect_ratio": "anyres_max_9"},
            preprocessor={
                "image_processor_type": "LlavaOnevisionImageProcessor",
                "image_grid_pinpoints": _ALL_PINPOINTS,
                "size": SQUARE,
            },
            processor={
                "num_image_tokens": 16,
                "vision_feature_select_strategy": "full",
                "vision_aspect_ratio": "anyres_max_9",
            },
        ),
        **PATCHED,
        "vipllava": Family(model_type="vipllava", preprocessor=_CLIP, processor=_DEFAULT),
        "internvl": Family(
            model_type="internvl",
            preprocessor={"image_processor_type": "GotOcr2ImageProcessorFast", "size": SQUARE, "max_patches": 6},
            processor={"image_seq_length": 4},
        ),
        "gemma3": Family(
            model_type="gemma3",
            said={"vision_config": _HEADLESS},
            preprocessor={"image_processor_type": "Gemma3ImageProcessor", "size": SQUARE, "do_pan_and_scan": None},
            processor={"image_seq_length": 4},
        ),
        "idefics3": Family(
            model_type="idefics3",
            preprocessor={
                "image_processor_type": "Idefics3ImageProcessor",
                "size": {"longest_edge": LARGEST},
                "max_image_size": {"longest_edge": TILE},
            },
            processor={"image_seq_len": 4},
        ),
        "smolvlm": Family(
            model_type="smolvlm",
            preprocessor={
                "image_processor_type": "SmolVLMImageProcessorFast",
                "size": {"longest_edge": LARGEST - 7},
                "max_image_size": {"longest_edge": TILE},
            },
            processor={"image_seq_len": 4},
        ),
        "mistral3": Family(
            model_type="mistral3",
            said={"spatial_merge_size": 2},
            preprocessor=_PIXTRAL,
            processor={"patch_size": PATCH, "spatial_merge_size": 2},
        ),
        "aya_vision": Family(
            model_type="aya_vision",
            preprocessor={"image_processor_type": "GotOcr2ImageProcessor", "size": SQUARE, "max_patches": 6},
            processor={"patch_size": PATCH, "img_size": TILE, "downsample_factor": 2},
        ),
        "lighton_ocr": Family(
            model_type="lighton_ocr",
            said={"spatial_merge_size": 2},
            preprocessor=_PIXTRAL,
            processor={"patch_size": PATCH, "spatial_merge_size": 2},
        ),
        "deepseek_vl": Family(
            model_type="deepseek_vl",
            said={"vision_config": _HEADLESS},
            preprocessor={
                "image_processor_type": "DeepseekVLImageProcessor",
                "size": SQUARE,
                "min_size": TILE // 2,
            },
            processor={"num_image_tokens": 16},
        ),
        "got_ocr2": Family(
            model_type="got_ocr2",
            preprocessor={
                "image_processor_type": "GotOcr2ImageProcessor",
                "size": {"height": LARGEST, "width": LARGEST},
            },
            processor={"num_image_tokens": 16},
        ),
        "janus": Family(
            model_type="janus",
            preprocessor={"image_processor_type": "JanusImageProcessor", "size": SQUARE, "min_size": TILE // 2},
            processor={"num_image_tokens": 16},
        ),
        "paligemma": Family(
            model_type="paligemma",
            preprocessor={"image_processor_type": "SiglipImageProcessor", "size": SQUARE, "image_seq_length": 16},
        ),
    }
)

SIZES = (
    *((1, 1), (1, 40), (40, 1), (13, 97), (97, 13), (8, 300)),
    *((TILE, TILE), (2 * TILE, 2 * TILE), (TILE, 3 * TILE), (TILE + 1, TILE - 1), (200, 150), (64, 64)),
)
"""Heights and widths: tiny, very wide and tall, exact tiles, one pixel beside them, and larger than anything takes."""

EACH = pytest.mark.parametrize("name", sorted(FOLDERS))


def picture(size: tuple[int, int], mode: str = "RGB") -> Image.Image:
    """Return a picture of noise, the same each time."""
    values = np.random.default_rng(size).integers(0, 256, (*size, 4), dtype=np.uint8)
    return Image.fromarray(values, "RGBA").convert(mode)
