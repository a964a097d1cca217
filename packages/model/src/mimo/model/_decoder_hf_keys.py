"""What the keys of a published ``config.json`` and the settings of ``decoder`` mean to each other, by family.

Reading refuses, by its key, what the decoder can't do. Writing tells what the family has keys for, and no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from mimo.hooks import ConfigError
from mimo.model._decoder_config import DecoderConfig
from mimo.model._hf_keys import flag, number, only, refuse

Keys: TypeAlias = Mapping[str, Any]
"""Of a ``config.json``."""

_NUMBERS = {
    "vocabulary": "vocab_size",
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
}
_SCALING = {
    "rope_factor": "factor",
    "rope_low_factor": "low_freq_factor",
    "rope_high_factor": "high_freq_factor",
    "rope_original_tokens": "original_max_position_embeddings",
}
_SCALED_BY: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("rope_factor",),
    "llama3": tuple(_SCALING),
}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_LONGEST = 131_072  # what is written as the longest sample, since the decoder knows none and a folder must name one
_SECTION = (16, 24, 24)  # of Qwen2-VL's families, where a folder names none
UNREAD = DecoderConfig().intermediate
"""``intermediate`` of a model without dense layers, which may not set another."""


def read_common(keys: Keys, *, grids: bool) -> dict[str, Any]:
    """Return the settings that all families have keys for.

    Args:
        keys: all that matter, what was left out included.
        grids: whether the family turns rows of images by three positions.
    """
    only(keys, "hidden_act", ["silu"])
    only(keys, "attention_dropout", [0.0])
    only(keys, "is_causal", [True])
    only(keys, "quantization_config", [None])
    return {
        **{ours: number(keys, theirs) for ours, theirs in _NUMBERS.items()},
        "kv_heads": keys.get("num_key_value_heads") or number(keys, "num_attention_heads"),
        "head_dim": keys.get("head_dim") or 0,
        "norm_eps": keys["rms_norm_eps"],
        "tied": flag(keys, "tie_word_embeddings"),
        **_read_rope(keys, grids=grids),
    }


def _read_rope(keys: Keys, *, grids: bool) -> dict[str, Any]:
    """Return what ``rope_scaling`` says and ``rope_theta`` beside it, or ``rope_parameters`` since transformers 5."""
    name = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    rope = keys.get(name) or {}
    for kind, inner in rope.items():
        if isinstance(inner, Mapping):
            raise refuse(f"{name}.{kind}", "the same positions in all layers", inner)
    kind = rope.get("rope_type", rope.get("type", "default"))
    section = rope.get("mrope_section", _SECTION) if grids else ()
    if not grids:
        only(rope, "mrope_section", [[]])
    elif kind == "mrope":  # the name that Qwen2-VL's folders have for it
        kind = "default"
    if kind not in _SCALED_BY:
        raise refuse(f"{name}.rope_type", f"one of {', '.join(_SCALED_BY)}", kind)
    only({"partial_rotary_factor": keys.get("partial_rotary_factor"), **rope}, "partial_rotary_factor", [1.0])
    only(rope, "mrope_interleaved", [False])
    found = {"rope_theta": rope.get("rope_theta", keys["rope_theta"]), "mrope_section": tuple(section)}
    if kind == "default":
        return found
    given = {"original_max_position_embeddings": keys.get("max_position_embeddings"), **rope}
    if keys.get("original_max_position_embeddings") is not None:  # which transformers puts above the one in there
        given["original_max_position_embeddings"] = keys["original_max_position_embeddings"]
    for ours in _SCALED_BY[kind]:
        if given.get(_SCALING[ours]) is None:
            raise refuse(f"{name}.{_SCALING[ours]}", f"a number, as rope_type {kind!r} needs it", None)
        found[ours] = given[_SCALING[ours]]
    return {**found, "rope_scaling": kind}


def _read_biases(keys: Keys) -> dict[str, Any]:
    return {"attention_bias": flag(keys, "attention_bias")}


def read_llama(keys: Keys) -> dict[str, Any]:
    """Return what Llama has besides."""
    _one_window(keys, None)  # layers that have one are refused
    return {**_read_biases(keys), "mlp_bias": flag(keys, "mlp_bias")}


def read_mistral(keys: Keys) -> dict[str, Any]:
    """Return what Mistral has besides."""
    return {"sliding_window": _one_window(keys, keys["sliding_window"])}


def _one_window(keys: Keys, said: Any) -> int:
    """Return the window where all layers have it, 0 for none; layers that are named besides must be of that kind."""
    window = number({"sliding_window": said}, "sliding_window") if said else 0
    if _are_windowed(keys, window) is not bool(window):
        raise refuse("layer_types", f"{_SLIDING if window else _FULL} alone", keys["layer_types"])
    return window


def _are_windowed(keys: Keys, window: int) -> bool:
    """Return whether ``layer_types`` names layers with a window; as ``window`` says where it is not there."""
    kinds, layers = keys.get("layer_types"), number(keys, "num_hidden_layers")
    if kinds is not None and kinds not in ([_FULL] * layers, [_SLIDING] * layers):
        raise refuse("layer_types", "a window on all layers or on none", kinds)
    return bool(window) if kinds is None else _SLIDING in kinds


def _read_window(keys: Keys) -> dict[str, Any]:
    """Return the window of Qwen's folders, which may leave it to later layers; the decoder has one for all."""
    said = keys["sliding_window"] if flag(keys, "use_sliding_window") else None
    if keys.get("layer_types") is not None:
        return {"sliding_window": _one_window(keys, said if _are_windowed(keys, 0) else None)}
    full, layers = number(keys, "max_window_layers"), number(keys, "num_hidden_layers")
    if said and 0 < full < layers:
        raise refuse("max_window_layers", "a window on all layers or on none", full)
    return {"sliding_window": _one_window(keys, said if full <= 0 else None)}


def read_qwen2(keys: Keys) -> dict[str, Any]:
    """Return what Qwen 2.5 has besides."""
    return {**_read_window(keys), "qkv_bias": True}


def read_qwen3(keys: Keys) -> dict[str, Any]:
    """Return what Qwen 3 has besides."""
    return {
        **_read_window(keys),
        **_read_biases(keys),
        "query_key_norm": True,
        "head_dim": keys.get("head_dim") or 128,
    }


def read_qwen3_moe(keys: Keys) -> dict[str, Any]:
    """Return what Qwen3-MoE has besides."""
    only(keys, "decoder_sparse_step", [1])
    dense = sorted(keys.get("mlp_only_layers") or [])
    if dense != list(range(len(dense))):
        raise refuse("mlp_only_layers", "the first layers, as others than these all have experts", dense)
    return {
        **_read_biases(keys),
        "sliding_window": _one_window(keys, keys["sliding_window"] if flag(keys, "use_sliding_window") else None),
        "query_key_norm": True,
        "intermediate": number(keys, "intermediate_size") if dense else UNREAD,
        "dense_layers": len(dense),
        "experts": number(keys, "num_local_experts" if "num_local_experts" in keys else "num_experts"),
        "experts_per_token": number(keys, "num_experts_per_tok"),
        "expert_intermediate": number(keys, "moe_intermediate_size"),
        "router_normalize": flag(keys, "norm_topk_prob"),
    }


def write_common(config: DecoderConfig) -> dict[str, Any]:
    """Return the keys that all families have."""
    stretched = config.rope_original_tokens * config.rope_factor
    return {
        **{theirs: getattr(config, ours) for ours, theirs in _NUMBERS.items()},
        "num_key_value_heads": config.key_value_heads,
        "head_dim": config.head_width,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "attention_dropout": 0.0,
        "max_position_embeddings": int(stretched) if config.rope_scaling == "llama3" else _LONGEST,
        **_write_rope(config, {}),
    }


def _write_rope(config: DecoderConfig, more: Keys) -> dict[str, Any]:
    """Return positions in both spellings: a reader that doesn't know one of them must not turn otherwise."""
    kind = "default" if config.rope_scaling == "none" else config.rope_scaling
    rope = {"rope_type": kind, **{_SCALING[ours]: getattr(config, ours) for ours in _SCALED_BY[kind]}, **more}
    return {
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
        "rope_scaling": rope if len(rope) > 1 else None,
        "rope_theta": config.rope_theta,
    }


def write_llama(config: DecoderConfig) -> Keys:
    """Return those of Llama besides."""
    if config.hidden % config.heads:
        raise ConfigError(
            "modules.language.config.hidden",
            expected=f"a multiple of heads = {config.heads}, as LlamaConfig demands whatever head_dim is",
            got=repr(config.hidden),
            fix="Write it as another family.",
        )
    return {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}


def write_mistral(config: DecoderConfig) -> Keys:
    """Return those of Mistral besides."""
    return {"sliding_window": config.sliding_window or None}


def write_window(config: DecoderConfig) -> Keys:
    """Return those of Qwen 2.5 besides."""
    window = config.sliding_window
    return {
        "use_sliding_window": bool(window),
        "sliding_window": window or None,
        "max_window_layers": 0 if window else config.layers,
    }


def write_qwen2_vl(config: DecoderConfig) -> Keys:
    """Return those of Qwen2-VL's text besides."""
    if not config.mrope_section:
        raise ConfigError(
            "modules.language.config.mrope_section",
            expected="numbers of turned pairs, as these models always have them",
            got="none",
            fix="Write it as another family.",
        )
    if config.head_width * config.heads != config.hidden:
        raise ConfigError(
            "modules.language.config.head_dim",
            expected=f"hidden / heads = {config.hidden / config.heads:g}, as these models have no other",
            got=repr(config.head_width),
            fix="Write it as another family.",
        )
    return {**write_window(config), **_write_rope(config, {"mrope_section": list(config.mrope_section)})}


def write_nothing(_config: DecoderConfig) -> Keys:
    """Refuse to write a family that is more than a language model."""
    raise ConfigError(
        "modules.language.config",
        expected="a language model with its vision tower",
        got="a language model alone",
        fix="Write it as its text alone: qwen2_vl_text or qwen2_5_vl_text.",
    )


def write_qwen3(config: DecoderConfig) -> Keys:
    """Return those of Qwen 3 besides."""
    return {**write_window(config), "attention_bias": config.attention_bias}


def write_qwen3_moe(config: DecoderConfig) -> Keys:
    """Return those of Qwen3-MoE besides."""
    return {
        "use_sliding_window": bool(config.sliding_window),
        "sliding_window": config.sliding_window or None,
        "attention_bias": config.attention_bias,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(config.dense_layers)),
        "num_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_intermediate or config.intermediate,
        "norm_topk_prob": config.router_normalize,
    }
