"""What a small published folder of a model of images and text consists of, and parts that several have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from mimo_transformers.image_files import processing_of
from mimo_transformers.images import ImageProcessing

TILE = 28
SQUARE = {"height": TILE, "width": TILE}
COVERED = {"size": {"shortest_edge": TILE}, "crop_size": SQUARE}
TEXT = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "pad_token_id": 0,
}
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": TILE,
    "patch_size": 7,
}
CLIP = {"model_type": "clip_vision_model", **TOWER, "patch_size": 14}
SIGLIP = {"model_type": "siglip_vision_model", **TOWER, "vision_use_head": False}
PIXTRAL = {"model_type": "pixtral", **TOWER, "image_size": 64, "patch_size": 4, "head_dim": 8}
QWEN_TOWER = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
GRID_TEXT = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
BOUNDS = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 256, "max_pixels": 4096}


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
