"""Small published folders of each family of images and text, and pictures of ragged sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from PIL import Image
from published_folder import CLIP, COVERED, PIXTRAL, SIGLIP, SQUARE, TEXT, TILE, TOWER, Folder
from published_patches import PATCHED

_PINPOINTS = [[TILE, 56], [56, TILE], [56, 56], [84, TILE], [TILE, 84]]
_ALL_PINPOINTS = [[down, across] for down in range(TILE, 113, TILE) for across in range(TILE, 113, TILE)]


def _llava(tower: Mapping[str, Any], text: str = "llama", **others: Any) -> Mapping[str, Any]:
    return {"model_type": "llava", "vision_config": tower, "text_config": {"model_type": text, **TEXT}, **others}


FOLDERS: Mapping[str, Folder] = {
    "llava": Folder(
        config=_llava(CLIP),
        preprocessor={"image_processor_type": "CLIPImageProcessor", **COVERED},
        processor={"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
    ),
    "llava padded": Folder(
        config=_llava(SIGLIP, vision_feature_select_strategy="full"),
        preprocessor={
            "image_processor_type": "LlavaImageProcessorFast",
            "do_pad": True,
            "size": SQUARE,
            "do_center_crop": False,
        },
    ),
    "llava pixtral": Folder(
        config=_llava(PIXTRAL, vision_feature_layer=-1, vision_feature_select_strategy="full"),
        preprocessor={"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 64}, "patch_size": 4},
        processor={"patch_size": 4, "image_token": "[IMG]"},
    ),
    "llava_next": Folder(
        config={**_llava(CLIP, image_grid_pinpoints=_PINPOINTS), "model_type": "llava_next"},
        preprocessor={
            "image_processor_type": "LlavaNextImageProcessor",
            "image_grid_pinpoints": _PINPOINTS,
            "do_pad": True,
            **COVERED,
        },
        processor={"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
    ),
    "llava_next_video": Folder(
        config={**_llava(CLIP, image_grid_pinpoints=_PINPOINTS), "model_type": "llava_next_video"},
        preprocessor={
            "image_processor_type": "LlavaNextImageProcessor",
            "image_grid_pinpoints": _PINPOINTS,
            "do_pad": True,
            **COVERED,
        },
        processor={"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
    ),
    "llava_onevision": Folder(
        config={
            **_llava(SIGLIP, "qwen2", image_grid_pinpoints=_ALL_PINPOINTS, vision_aspect_ratio="anyres_max_4"),
            "model_type": "llava_onevision",
        },
        preprocessor={
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "image_grid_pinpoints": _ALL_PINPOINTS,
            "size": SQUARE,
        },
        processor={
            "num_image_tokens": 16,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_4",
        },
    ),
    **PATCHED,
    "vipllava": Folder(
        config={
            **_llava(CLIP, vision_feature_layers=[-2, 1]),
            "model_type": "vipllava",
        },
        preprocessor={"image_processor_type": "CLIPImageProcessor", **COVERED},
        processor={"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
    ),
    "internvl": Folder(
        config={
            "model_type": "internvl",
            "text_config": {"model_type": "qwen2", **TEXT},
            "vision_config": {
                "model_type": "internvl_vision",
                **TOWER,
                "image_size": [TILE, TILE],
                "patch_size": [7, 7],
            },
            "image_seq_length": 4,
        },
        preprocessor={"image_processor_type": "GotOcr2ImageProcessorFast", "size": SQUARE, "max_patches": 6},
        processor={"image_seq_length": 4},
    ),
    "gemma3": Folder(
        config={
            "model_type": "gemma3",
            "text_config": TEXT,
            "vision_config": SIGLIP,
            "mm_tokens_per_image": 4,
        },
        preprocessor={"image_processor_type": "Gemma3ImageProcessor", "size": SQUARE, "do_pan_and_scan": None},
        processor={"image_seq_length": 4},
    ),
    "idefics3": Folder(
        config={
            "model_type": "idefics3",
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": TOWER,
            "scale_factor": 2,
        },
        preprocessor={
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 4 * TILE},
            "max_image_size": {"longest_edge": TILE},
        },
        processor={"image_seq_len": 4},
    ),
    "smolvlm": Folder(
        config={
            "model_type": "smolvlm",
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": TOWER,
            "scale_factor": 2,
        },
        preprocessor={
            "image_processor_type": "SmolVLMImageProcessorFast",
            "size": {"longest_edge": 100},
            "max_image_size": {"longest_edge": TILE},
        },
        processor={"image_seq_len": 4},
    ),
    "mistral3": Folder(
        config={
            "model_type": "mistral3",
            "text_config": {"model_type": "mistral", **TEXT},
            "vision_config": PIXTRAL,
            "spatial_merge_size": 2,
        },
        preprocessor={
            "image_processor_type": "PixtralImageProcessorFast",
            "size": {"longest_edge": 64},
            "patch_size": 4,
        },
        processor={"patch_size": 4, "spatial_merge_size": 2},
    ),
    "aya_vision": Folder(
        config={
            "model_type": "aya_vision",
            "text_config": {"model_type": "cohere2", **TEXT},
            "vision_config": SIGLIP,
        },
        preprocessor={"image_processor_type": "GotOcr2ImageProcessor", "size": SQUARE, "max_patches": 6},
        processor={"patch_size": 7, "img_size": TILE, "downsample_factor": 2},
    ),
    "lighton_ocr": Folder(
        config={
            "model_type": "lighton_ocr",
            "text_config": {"model_type": "qwen3", **TEXT},
            "vision_config": PIXTRAL,
            "spatial_merge_size": 2,
        },
        preprocessor={
            "image_processor_type": "PixtralImageProcessorFast",
            "size": {"longest_edge": 64},
            "patch_size": 4,
        },
        processor={"patch_size": 4, "spatial_merge_size": 2},
    ),
    "deepseek_vl": Folder(
        config={
            "model_type": "deepseek_vl",
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": SIGLIP,
        },
        preprocessor={"image_processor_type": "DeepseekVLImageProcessor", "size": SQUARE, "min_size": 14},
        processor={"num_image_tokens": 16},
    ),
    "got_ocr2": Folder(
        config={
            "model_type": "got_ocr2",
            "text_config": {"model_type": "qwen2", **TEXT},
            "vision_config": {
                **{key: one for key, one in TOWER.items() if key != "intermediate_size"},
                "mlp_dim": 16,
                "output_channels": 16,
                "image_size": 64,
                "patch_size": 4,
                "window_size": 3,
                "global_attn_indexes": [1],
            },
        },
        preprocessor={"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 64, "width": 64}},
        processor={"num_image_tokens": 16},
    ),
    "janus": Folder(
        config={
            "model_type": "janus",
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": {
                **{key: one for key, one in TOWER.items() if key != "intermediate_size"},
                "mlp_ratio": 1.0,
                "projection_dim": 16,
            },
            "vq_config": {"base_channels": 32, "num_embeddings": 8, "channel_multiplier": [1], "projection_dim": 16},
        },
        preprocessor={"image_processor_type": "JanusImageProcessor", "size": SQUARE, "min_size": 14},
        processor={"num_image_tokens": 16},
    ),
    "paligemma": Folder(
        config={
            "model_type": "paligemma",
            "text_config": {"model_type": "gemma", **TEXT, "num_image_tokens": 16},
            "vision_config": SIGLIP,
            "projection_dim": 16,
        },
        preprocessor={"image_processor_type": "SiglipImageProcessor", "size": SQUARE, "image_seq_length": 16},
    ),
}

SIZES = (
    *((1, 1), (1, 40), (40, 1), (13, 97), (97, 13), (8, 300)),
    *((TILE, TILE), (56, 56), (TILE, 84), (29, 27), (200, 150), (64, 64)),
)
"""Heights and widths: tiny, very wide and tall, exact tiles, one pixel beside them, and larger than anything takes."""

EACH = pytest.mark.parametrize("name", sorted(FOLDERS))


def picture(size: tuple[int, int], mode: str = "RGB") -> Image.Image:
    """Return a picture of noise, the same each time."""
    values = np.random.default_rng(size).integers(0, 256, (*size, 4), dtype=np.uint8)
    return Image.fromarray(values, "RGBA").convert(mode)
