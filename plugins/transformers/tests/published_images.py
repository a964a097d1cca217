"""Small published folders of each family of images and text, and pictures of ragged sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import pytest
from PIL import Image

from mimo_transformers.images import ImageProcessing, processing_of

TILE = 28
_SQUARE = {"height": TILE, "width": TILE}
_COVERED = {"size": {"shortest_edge": TILE}, "crop_size": _SQUARE}
_PINPOINTS = [[TILE, 56], [56, TILE], [56, 56], [84, TILE], [TILE, 84]]
_ALL_PINPOINTS = [[down, across] for down in range(TILE, 113, TILE) for across in range(TILE, 113, TILE)]
_TEXT = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "pad_token_id": 0,
}
_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": TILE,
    "patch_size": 7,
}
_CLIP = {"model_type": "clip_vision_model", **_TOWER, "patch_size": 14}
_SIGLIP = {"model_type": "siglip_vision_model", **_TOWER, "vision_use_head": False}
_PIXTRAL = {"model_type": "pixtral", **_TOWER, "image_size": 64, "patch_size": 4, "head_dim": 8}
_QWEN = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN_TEXT = {**_TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
_BOUNDS = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 256, "max_pixels": 4096}


@attrs.frozen(kw_only=True)
class Folder:
    """What files of a small published folder say.

    Args:
        config: of the model.
        preprocessor: of the image processor.
        processor: of both.
    """

    config: Mapping[str, Any]
    preprocessor: Mapping[str, Any]
    processor: Mapping[str, Any] = attrs.field(factory=dict)

    def processing(self) -> ImageProcessing:
        """Return what is made of it."""
        return processing_of(self.config, self.preprocessor, self.processor)


def _llava(tower: Mapping[str, Any], text: str = "llama", **others: Any) -> Mapping[str, Any]:
    return {"model_type": "llava", "vision_config": tower, "text_config": {"model_type": text, **_TEXT}, **others}


def _qwen3(model_type: str, **text: Any) -> Folder:
    return Folder(
        config={
            "model_type": model_type,
            "text_config": {**_QWEN_TEXT, **text},
            "vision_config": {
                **_QWEN,
                "out_hidden_size": 16,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
        },
        preprocessor={
            "image_processor_type": "Qwen2VLImageProcessorFast",
            **{key: value for key, value in _BOUNDS.items() if "pixels" not in key},
            "size": {"shortest_edge": 512, "longest_edge": 4096},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    )


FOLDERS: Mapping[str, Folder] = {
    "llava": Folder(
        config=_llava(_CLIP),
        preprocessor={"image_processor_type": "CLIPImageProcessor", **_COVERED},
        processor={"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
    ),
    "llava padded": Folder(
        config=_llava(_SIGLIP, vision_feature_select_strategy="full"),
        preprocessor={
            "image_processor_type": "LlavaImageProcessorFast",
            "do_pad": True,
            "size": _SQUARE,
            "do_center_crop": False,
        },
    ),
    "llava pixtral": Folder(
        config=_llava(_PIXTRAL, vision_feature_layer=-1, vision_feature_select_strategy="full"),
        preprocessor={"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 64}, "patch_size": 4},
        processor={"patch_size": 4, "image_token": "[IMG]"},
    ),
    "llava_next": Folder(
        config={**_llava(_CLIP, image_grid_pinpoints=_PINPOINTS), "model_type": "llava_next"},
        preprocessor={
            "image_processor_type": "LlavaNextImageProcessor",
            "image_grid_pinpoints": _PINPOINTS,
            "do_pad": True,
            **_COVERED,
        },
        processor={"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
    ),
    "llava_onevision": Folder(
        config={
            **_llava(_SIGLIP, "qwen2", image_grid_pinpoints=_ALL_PINPOINTS, vision_aspect_ratio="anyres_max_4"),
            "model_type": "llava_onevision",
        },
        preprocessor={
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "image_grid_pinpoints": _ALL_PINPOINTS,
            "size": _SQUARE,
        },
        processor={
            "num_image_tokens": 16,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_4",
        },
    ),
    "qwen2_vl": Folder(
        config={
            "model_type": "qwen2_vl",
            "text_config": _QWEN_TEXT,
            "vision_config": {**_QWEN, "embed_dim": 16, "hidden_size": 16, "mlp_ratio": 1},
        },
        preprocessor={"image_processor_type": "Qwen2VLImageProcessor", **_BOUNDS},
    ),
    "qwen2_5_vl": Folder(
        config={
            "model_type": "qwen2_5_vl",
            "text_config": _QWEN_TEXT,
            "vision_config": {**_QWEN, "out_hidden_size": 16, "window_size": 16, "fullatt_block_indexes": [1]},
        },
        preprocessor={"image_processor_type": "Qwen2VLImageProcessorFast", **_BOUNDS},
    ),
    "qwen3_vl": _qwen3("qwen3_vl"),
    "qwen3_vl_moe": _qwen3("qwen3_vl_moe", moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2),
    "vipllava": Folder(
        config={
            **_llava(_CLIP, vision_feature_layers=[-2, 1]),
            "model_type": "vipllava",
        },
        preprocessor={"image_processor_type": "CLIPImageProcessor", **_COVERED},
        processor={"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
    ),
    "internvl": Folder(
        config={
            "model_type": "internvl",
            "text_config": {"model_type": "qwen2", **_TEXT},
            "vision_config": {
                "model_type": "internvl_vision",
                **_TOWER,
                "image_size": [TILE, TILE],
                "patch_size": [7, 7],
            },
            "image_seq_length": 4,
        },
        preprocessor={"image_processor_type": "GotOcr2ImageProcessorFast", "size": _SQUARE, "max_patches": 6},
        processor={"image_seq_length": 4},
    ),
    "gemma3": Folder(
        config={
            "model_type": "gemma3",
            "text_config": _TEXT,
            "vision_config": _SIGLIP,
            "mm_tokens_per_image": 4,
        },
        preprocessor={"image_processor_type": "Gemma3ImageProcessor", "size": _SQUARE, "do_pan_and_scan": None},
        processor={"image_seq_length": 4},
    ),
    "idefics3": Folder(
        config={
            "model_type": "idefics3",
            "text_config": {"model_type": "llama", **_TEXT},
            "vision_config": _TOWER,
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
            "text_config": {"model_type": "llama", **_TEXT},
            "vision_config": _TOWER,
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
            "text_config": {"model_type": "mistral", **_TEXT},
            "vision_config": _PIXTRAL,
            "spatial_merge_size": 2,
        },
        preprocessor={
            "image_processor_type": "PixtralImageProcessorFast",
            "size": {"longest_edge": 64},
            "patch_size": 4,
        },
        processor={"patch_size": 4, "spatial_merge_size": 2},
    ),
    "paligemma": Folder(
        config={
            "model_type": "paligemma",
            "text_config": {"model_type": "gemma", **_TEXT, "num_image_tokens": 16},
            "vision_config": _SIGLIP,
            "projection_dim": 16,
        },
        preprocessor={"image_processor_type": "SiglipImageProcessor", "size": _SQUARE, "image_seq_length": 16},
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
