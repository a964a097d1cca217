"""Where published folders of SigLIP, SigLIP 2 and CLIP hold their vision towers, alone or inside composed models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mimo.model import HfFamily, HfTensor, hf_known, hf_no_dropout, hf_number, hf_refused, hf_small
from mimo_encoder_vision._config import ClipConfig, LearnedConfig, SiglipConfig, refused

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "relu": "relu",
}
_DROPOUT = ("attention_dropout",)
_WRITTEN = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
_KEYS = {
    "patch": "patch_size",
    "channels": "num_channels",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "eps": "layer_norm_eps",
}
# What a key that ``config.json`` leaves out means there.
_SIGLIP_DEFAULTS: Mapping[str, Any] = {
    "patch_size": 16,
    "num_channels": 3,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-6,
    "hidden_act": "gelu_pytorch_tanh",
    "attention_dropout": 0.0,
    "image_size": 224,
    "num_patches": 256,
}
_CLIP_DEFAULTS = {**_SIGLIP_DEFAULTS, "patch_size": 32, "layer_norm_eps": 1e-5, "hidden_act": "quick_gelu"}
_LAYER = {
    "attention_norm": "layer_norm1",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.out_proj",
    "mlp_norm": "layer_norm2",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
}
_RENAMED: Sequence[Mapping[str, str]] = (
    {},
    {"": "vision_model."},
    {"": "vision_tower.vision_model."},
    {"": "model.vision_tower.vision_model."},
    {"": "vision_tower."},
    {"": "model.vision_tower."},
    {"": "model.vision_model."},
)


def _siglip(published: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**_common(published, _SIGLIP_DEFAULTS), **_square(published, _SIGLIP_DEFAULTS)}


def _siglip2(published: Mapping[str, Any]) -> Mapping[str, Any]:
    patches = hf_number({**_SIGLIP_DEFAULTS, **published}, "num_patches")
    table = math.isqrt(patches)
    if table**2 != patches:
        raise hf_refused("num_patches", "a square number", patches)
    native = {"mode": "native", "enlarge": True, "max_patches": patches, "resample": "bilinear"}
    return {**_common(published, _SIGLIP_DEFAULTS), "table": table, "resize_positions": "bilinear", **native}


def _clip(published: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**_common(published, _CLIP_DEFAULTS), **_square(published, _CLIP_DEFAULTS)}


def _common(published: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    given = {**defaults, **published}
    if not isinstance(given["patch_size"], int):
        raise hf_refused("patch_size", "one number for both sides", given["patch_size"])
    hf_no_dropout(given, _DROPOUT)
    activation = hf_known(given, "hidden_act", _ACTIVATIONS)
    sizes = {ours: hf_number(given, theirs) for ours, theirs in _KEYS.items() if ours != "eps"}
    return {**sizes, "eps": hf_small(given, _KEYS["eps"]), "activation": activation}


def _square(published: Mapping[str, Any], defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    given = {**defaults, **published}
    if not isinstance(given["image_size"], int):
        raise hf_refused("image_size", "one number for both sides", given["image_size"])
    if hf_number(given, "image_size") < hf_number(given, "patch_size"):
        raise hf_refused("image_size", f"at least patch_size = {given['patch_size']}", given["image_size"])
    return {"size": given["image_size"], "table": given["image_size"] // given["patch_size"]}


def _describe(config: LearnedConfig) -> dict[str, Any]:
    if config.activation not in _WRITTEN:
        raise refused("activation", f"one of {', '.join(map(repr, _WRITTEN))}", config.activation)
    return {theirs: getattr(config, ours) for ours, theirs in _KEYS.items()} | {
        "hidden_act": _WRITTEN[config.activation],
        "attention_dropout": 0.0,
    }


def _describe_square(config: LearnedConfig) -> Mapping[str, Any]:
    size = config.size if config.side == config.places else config.places * config.patch
    return {**_describe(config), "image_size": size}


def _describe_siglip(config: LearnedConfig) -> Mapping[str, Any]:
    return {**_describe_square(config), "vision_use_head": False}


def _describe_siglip2(config: LearnedConfig) -> Mapping[str, Any]:
    return {**_describe(config), "num_patches": config.places**2, "vision_use_head": False}


def _tensors(config: LearnedConfig) -> list[HfTensor]:
    """Return what all three have: positions, layers, and the norm after them."""
    table = [HfTensor(ours="positions.weight", theirs="embeddings.position_embedding.weight")]
    pairs = {"norm": "post_layernorm"} | {
        f"layers.{index}.{ours}": f"encoder.layers.{index}.{theirs}"
        for index in range(config.layers)
        for ours, theirs in _LAYER.items()
    }
    return table + _with_bias(pairs)


def _with_bias(pairs: Mapping[str, str]) -> list[HfTensor]:
    return [
        HfTensor(ours=f"{ours}.{leaf}", theirs=f"{theirs}.{leaf}")
        for ours, theirs in pairs.items()
        for leaf in ("weight", "bias")
    ]


def _kernel(config: LearnedConfig) -> HfTensor:
    """Return the patches' product where it is written as a convolution."""
    shape = (config.width, config.channels, config.patch, config.patch)
    return HfTensor(ours="patch.weight", theirs="embeddings.patch_embedding.weight", shape=shape, dims=(0, 2, 3, 1))


def _siglip_tensors(config: SiglipConfig) -> Sequence[HfTensor]:
    bias = HfTensor(ours="patch.bias", theirs="embeddings.patch_embedding.bias")
    return [_kernel(config), bias, *_tensors(config)]


def _siglip2_tensors(config: SiglipConfig) -> Sequence[HfTensor]:
    return [*_with_bias({"patch": "embeddings.patch_embedding"}), *_tensors(config)]


def _clip_tensors(config: ClipConfig) -> Sequence[HfTensor]:
    token = HfTensor(ours="class_tokens.weight", theirs="embeddings.class_embedding", shape=(config.width,))
    pre_norm = _with_bias({"pre_norm": "pre_layrnorm"})  # their spelling
    return [_kernel(config), token, *pre_norm, *_tensors(config)]


_IGNORED = (
    *("head.*", "*vision_model.head.*", "*vision_tower.head.*", "*position_ids"),
    *("text_model.*", "*_projection.weight", "logit_scale", "logit_bias"),
    *("*language_model.*", "*multi_modal_projector.*", "lm_head.weight"),
)
"""Pooling heads, numbers of positions, and what a model of images and text has besides."""

SIGLIP_FAMILY = HfFamily(
    model_type="siglip_vision_model",
    architecture="SiglipVisionModel",
    settings=_siglip,
    describe=_describe_siglip,
    tensors=_siglip_tensors,
    renamed=_RENAMED,
    ignored=_IGNORED,
    dropout=_DROPOUT,
)
SIGLIP2_FAMILY = HfFamily(
    model_type="siglip2_vision_model",
    architecture="Siglip2VisionModel",
    settings=_siglip2,
    describe=_describe_siglip2,
    tensors=_siglip2_tensors,
    renamed=_RENAMED,
    ignored=_IGNORED,
    dropout=_DROPOUT,
)
CLIP_FAMILY = HfFamily(
    model_type="clip_vision_model",
    architecture="CLIPVisionModel",
    settings=_clip,
    describe=_describe_square,
    tensors=_clip_tensors,
    renamed=_RENAMED,
    ignored=_IGNORED,
    dropout=_DROPOUT,
)
