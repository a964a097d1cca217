"""Small published folders of families whose images have nearly their own size, in patches."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import attrs
from published_folder import BOUNDS, GRID_TEXT, QWEN_TOWER, TEXT, TOWER, Folder

_EXPERTS = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}


def _qwen3(model_type: str, **text: Any) -> Folder:
    return Folder(
        config={
            "model_type": model_type,
            "text_config": {**deepcopy(GRID_TEXT), **text},
            "vision_config": {
                **QWEN_TOWER,
                "depth": 4,
                "out_hidden_size": 16,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0, 1, 2],
            },
        },
        preprocessor={
            "image_processor_type": "Qwen2VLImageProcessorFast",
            **{key: value for key, value in BOUNDS.items() if "pixels" not in key},
            "size": {"shortest_edge": 512, "longest_edge": 4096},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    )


def _qwen3_5(model_type: str, leave_out: str = "", **text: Any) -> Folder:
    """Return a folder, in whose language model is linear attention first, and usual attention then."""
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    linear |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "full_attention_interval": 2}
    folder = _qwen3(model_type, **linear, head_dim=16, partial_rotary_factor=0.5, **text)
    described = {key: one for key, one in folder.config["text_config"].items() if key != leave_out}
    tower = {key: one for key, one in folder.config["vision_config"].items() if key != "deepstack_visual_indexes"}
    return attrs.evolve(folder, config={**folder.config, "text_config": described, "vision_config": tower})


def _glm(model_type: str, kind: str, **text: Any) -> Folder:
    return Folder(
        config={
            "model_type": model_type,
            "text_config": {**GRID_TEXT, **text},
            "vision_config": {**QWEN_TOWER, "out_hidden_size": 16, "image_size": 16},
        },
        preprocessor={
            "image_processor_type": f"{kind}ImageProcessorFast",
            **{key: value for key, value in BOUNDS.items() if "pixels" not in key},
            "size": {"shortest_edge": 512, "longest_edge": 4096},
        },
    )


PATCHED: Mapping[str, Folder] = {
    "qwen2_vl": Folder(
        config={
            "model_type": "qwen2_vl",
            "text_config": GRID_TEXT,
            "vision_config": {**QWEN_TOWER, "embed_dim": 16, "hidden_size": 16, "mlp_ratio": 1},
        },
        preprocessor={"image_processor_type": "Qwen2VLImageProcessor", **BOUNDS},
    ),
    "qwen2_5_vl": Folder(
        config={
            "model_type": "qwen2_5_vl",
            "text_config": GRID_TEXT,
            "vision_config": {**QWEN_TOWER, "out_hidden_size": 16, "window_size": 16, "fullatt_block_indexes": [1]},
        },
        preprocessor={"image_processor_type": "Qwen2VLImageProcessorFast", **BOUNDS},
    ),
    "qwen3_vl": _qwen3("qwen3_vl"),
    "qwen3_vl_moe": _qwen3("qwen3_vl_moe", **_EXPERTS),
    "qwen3_5": _qwen3_5("qwen3_5"),
    "qwen3_5_moe": _qwen3_5("qwen3_5_moe", "intermediate_size", **_EXPERTS, shared_expert_intermediate_size=8),
    "exaone4_5": Folder(
        config={
            "model_type": "exaone4_5",
            "text_config": {"model_type": "exaone4", **TEXT},
            "vision_config": {
                **QWEN_TOWER,
                "num_key_value_heads": 1,
                "out_hidden_size": 16,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
        },
        preprocessor={"image_processor_type": "Qwen2VLImageProcessorFast", **BOUNDS},
    ),
    "hyperclovax_vision_v2": Folder(
        config={
            "model_type": "hyperclovax_vision_v2",
            "text_config": {"model_type": "hyperclovax", **TEXT},
            "vision_config": {
                "model_type": "qwen2_5_vl_vision",
                **QWEN_TOWER,
                "out_hidden_size": 16,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
        },
        preprocessor={"image_processor_type": "Qwen2VLImageProcessorFast", **BOUNDS},
    ),
    "lfm3_vl": Folder(
        config={
            "model_type": "lfm3_vl",
            "text_config": {
                "model_type": "lfm3",
                **TEXT,
                "num_hidden_layers": 2,
                "layer_types": ["conv", "full_attention"],
            },
            "vision_config": {
                **{key: one for key, one in QWEN_TOWER.items() if key not in {"depth", "num_heads"}},
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
            },
        },
        preprocessor={"image_processor_type": "Qwen2VLImageProcessorFast", **BOUNDS},
    ),
    "glm4v": _glm("glm4v", "Glm4v"),
    "glm4v_moe": _glm(
        "glm4v_moe",
        "Glm4v",
        head_dim=16,
        moe_intermediate_size=8,
        num_experts_per_tok=2,
        n_routed_experts=4,
    ),
    "glm46v": _glm("glm46v", "Glm46V"),
    "glm_ocr": _glm("glm_ocr", "Glm46V"),
    "glmga": _glm("glmga", "Glmga"),
    "paddleocr_vl": Folder(
        config={
            "model_type": "paddleocr_vl",
            "text_config": GRID_TEXT,
            "vision_config": {**TOWER, "patch_size": 4, "spatial_merge_size": 2},
        },
        preprocessor={
            "image_processor_type": "PaddleOCRVLImageProcessor",
            **{key: one for key, one in BOUNDS.items() if "pixels" not in key},
            "temporal_patch_size": 1,
            "size": {"shortest_edge": 256, "longest_edge": 4096},
        },
    ),
    "video_llama_3": Folder(
        config={
            "model_type": "video_llama_3",
            "text_config": {"model_type": "qwen2", **TEXT},
            "vision_config": {**{key: one for key, one in TOWER.items() if key != "image_size"}, "patch_size": 4},
        },
        preprocessor={
            "image_processor_type": "VideoLlama3ImageProcessor",
            "patch_size": 4,
            "size": {"shortest_edge": 256, "longest_edge": 1024},
        },
    ),
}
"""Of each family of theirs."""
