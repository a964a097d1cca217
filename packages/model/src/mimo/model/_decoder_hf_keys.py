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
_LONGEST = 131_072  # what is written as the longest sample, since the decoder knows none and a folder must name one
UNREAD = DecoderConfig().intermediate
"""``intermediate`` of a model without dense layers, which may not set another."""


def read_common(keys: Keys) -> dict[str, Any]:
    """Return the settings that all families have keys for; ``keys`` are all that matter, what was left out included."""
    only(keys, "hidden_act", ["silu"])
    only(keys, "attention_dropout", [0.0])
    only(keys, "quantization_config", [None])
    return {
        **{ours: number(keys, theirs) for ours, theirs in _NUMBERS.items()},
        "kv_heads": keys.get("num_key_value_heads") or number(keys, "num_attention_heads"),
        "head_dim": keys.get("head_dim") or 0,
        "norm_eps": keys["rms_norm_eps"],
        "tied": flag(keys, "tie_word_embeddings"),
        **_read_rope(keys),
    }


def _read_rope(keys: Keys) -> dict[str, Any]:
    """Return what ``rope_scaling`` says and ``rope_theta`` beside it, or ``rope_parameters`` since transformers 5."""
    name = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    rope = keys.get(name) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    section = rope.get("mrope_section", ())
    if kind == "mrope" and section:  # the name that Qwen2-VL's folders have for it
        kind = "default"
    if kind not in _SCALED_BY:
        raise refuse(f"{name}.rope_type", f"one of {', '.join(_SCALED_BY)}", kind)
    only({"partial_rotary_factor": keys.get("partial_rotary_factor"), **rope}, "partial_rotary_factor", [1.0])
    only(rope, "mrope_interleaved", [False])
    found = {"rope_theta": rope.get("rope_theta", keys["rope_theta"]), "mrope_section": tuple(section)}
    if kind == "default":
        return found
    given = {"original_max_position_embeddings": keys.get("max_position_embeddings"), **rope}
    for ours in _SCALED_BY[kind]:
        if given.get(_SCALING[ours]) is None:
            raise refuse(f"{name}.{_SCALING[ours]}", f"a number, as rope_type {kind!r} needs it", None)
        found[ours] = given[_SCALING[ours]]
    return {**found, "rope_scaling": kind}


def _read_biases(keys: Keys) -> dict[str, Any]:
    return {"attention_bias": flag(keys, "attention_bias")}


def read_llama(keys: Keys) -> dict[str, Any]:
    """Return what Llama has besides."""
    return {**_read_biases(keys), "mlp_bias": flag(keys, "mlp_bias")}


def read_mistral(keys: Keys) -> dict[str, Any]:
    """Return what Mistral has besides."""
    return {"sliding_window": keys["sliding_window"] or 0}


def _read_window(keys: Keys) -> dict[str, Any]:
    """Return the window of Qwen's folders, which may leave it to later layers; the decoder has one for all."""
    if not flag(keys, "use_sliding_window"):
        return {"sliding_window": 0}
    name = "layer_types" if keys.get("layer_types") else "max_window_layers"
    layers, full = keys["num_hidden_layers"], keys["max_window_layers"]
    kinds = keys.get("layer_types") or ["full" if layer < full else "sliding" for layer in range(layers)]
    if len(set(kinds)) > 1:
        raise refuse(name, "a window on all layers or on none", keys.get(name, full))
    return {"sliding_window": 0 if kinds[0].startswith("full") else number(keys, "sliding_window")}


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
        "sliding_window": number(keys, "sliding_window") if flag(keys, "use_sliding_window") else 0,
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
