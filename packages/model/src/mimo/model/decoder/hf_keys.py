"""What the keys of a published ``config.json`` and the settings of ``decoder`` mean to each other, by family.

Reading refuses, by its key, what the decoder can't do. Writing tells what the family has keys for, and no more.
"""

from __future__ import annotations

from typing import Any

from mimo.hooks import ConfigError
from mimo.model.decoder.config import DecoderConfig
from mimo.model.decoder.hf_rope import Grids, read_rope, write_rope
from mimo.model.spec import (
    HfKeys,
    hf_divisor,
    hf_flag,
    hf_no_dropout,
    hf_number,
    hf_only,
    hf_real,
    hf_refused,
    hf_small,
)

_NUMBERS = {
    "vocabulary": "vocab_size",
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_LONGEST = 131_072  # what is written as the longest sample, since the decoder knows none and a folder must name one
_LARGEST_LOSS = 1e6  # as a coefficient, far above any
UNREAD = DecoderConfig().intermediate
"""``intermediate`` of a model without dense layers, which may not set another."""


DROPOUT = ("attention_dropout",)


def read_common(keys: HfKeys, *, grids: Grids | None) -> dict[str, Any]:
    """Return the settings that all families have keys for.

    Args:
        keys: all that matter, what was left out included.
        grids: how the family turns rows of images by three positions, if it does.
    """
    hf_only(keys, "hidden_act", ["silu"])
    hf_no_dropout(keys, DROPOUT)
    hf_only(keys, "is_causal", [True])
    hf_only(keys, "quantization_config", [None])
    return {
        **{ours: hf_number(keys, theirs) for ours, theirs in _NUMBERS.items()},
        "kv_heads": hf_divisor(keys, "num_key_value_heads", of="num_attention_heads"),
        "head_dim": hf_number(keys, "head_dim") if keys.get("head_dim") is not None else 0,
        "norm_eps": hf_small(keys, "rms_norm_eps"),
        "tied": hf_flag(keys, "tie_word_embeddings"),
        **read_rope(keys, grids=grids),
    }


def _read_biases(keys: HfKeys) -> dict[str, Any]:
    return {"attention_bias": hf_flag(keys, "attention_bias")}


def read_llama(keys: HfKeys) -> dict[str, Any]:
    """Return what Llama has besides."""
    _one_window(keys, None)  # layers that have one are refused
    return {**_read_biases(keys), "mlp_bias": hf_flag(keys, "mlp_bias")}


def read_mistral(keys: HfKeys) -> dict[str, Any]:
    """Return what Mistral has besides."""
    return {"sliding_window": _one_window(keys, keys["sliding_window"])}


def _one_window(keys: HfKeys, said: Any) -> int:
    """Return the window where all layers have it, 0 for none; layers that are named besides must be of that kind."""
    window = hf_number({"sliding_window": said}, "sliding_window") if said else 0
    if _are_windowed(keys, window) is not bool(window):
        raise hf_refused("layer_types", f"{_SLIDING if window else _FULL} alone", keys["layer_types"])
    return window


def _are_windowed(keys: HfKeys, window: int) -> bool:
    """Return whether ``layer_types`` names layers with a window; as ``window`` says where it is not there."""
    kinds, layers = keys.get("layer_types"), hf_number(keys, "num_hidden_layers")
    if kinds is not None and kinds not in ([_FULL] * layers, [_SLIDING] * layers):
        raise hf_refused("layer_types", "a window on all layers or on none", kinds)
    return bool(window) if kinds is None else _SLIDING in kinds


def _read_window(keys: HfKeys) -> dict[str, Any]:
    """Return the window of Qwen's folders, which may leave it to later layers; the decoder has one for all."""
    said = keys["sliding_window"] if hf_flag(keys, "use_sliding_window") else None
    if keys.get("layer_types") is not None:
        return {"sliding_window": _one_window(keys, said if _are_windowed(keys, 0) else None)}
    layers = hf_number(keys, "num_hidden_layers")
    full = hf_number(keys, "max_window_layers", low=0) if said else layers
    if said and 0 < full < layers:
        raise hf_refused("max_window_layers", "a window on all layers or on none", full)
    return {"sliding_window": _one_window(keys, said if full == 0 else None)}


def read_qwen2(keys: HfKeys) -> dict[str, Any]:
    """Return what Qwen 2.5 has besides."""
    return {**_read_window(keys), "qkv_bias": True}


def read_qwen3(keys: HfKeys) -> dict[str, Any]:
    """Return what Qwen 3 has besides."""
    return {
        **_read_window(keys),
        **_read_biases(keys),
        "query_key_norm": True,
        "head_dim": hf_number({"head_dim": keys.get("head_dim") or 128}, "head_dim"),
    }


def read_qwen3_vl(keys: HfKeys) -> dict[str, Any]:
    """Return what the text of Qwen3-VL has besides."""
    return {**_read_biases(keys), "query_key_norm": True}


def read_qwen3_moe(keys: HfKeys) -> dict[str, Any]:
    """Return what Qwen3-MoE has besides."""
    hf_only(keys, "decoder_sparse_step", [1])
    experts = "num_local_experts" if "num_local_experts" in keys else "num_experts"
    if hf_number(keys, "num_experts_per_tok") > hf_number(keys, experts):
        raise hf_refused("num_experts_per_tok", f"at most {experts} = {keys[experts]}", keys["num_experts_per_tok"])
    dense = sorted(keys.get("mlp_only_layers") or [])
    if dense != list(range(len(dense))) or len(dense) > hf_number(keys, "num_hidden_layers"):
        raise hf_refused("mlp_only_layers", "the first layers, as others than these all have experts", dense)
    return {
        **_read_biases(keys),
        "sliding_window": _one_window(keys, keys["sliding_window"] if hf_flag(keys, "use_sliding_window") else None),
        "query_key_norm": True,
        "intermediate": hf_number(keys, "intermediate_size") if dense else UNREAD,
        "dense_layers": len(dense),
        "experts": hf_number(keys, experts),
        "experts_per_token": hf_number(keys, "num_experts_per_tok"),
        "expert_intermediate": hf_number(keys, "moe_intermediate_size"),
        "router_normalize": hf_flag(keys, "norm_topk_prob"),
        "balance_loss": _read_balance_loss(keys, layers=hf_number(keys, "num_hidden_layers") - len(dense)),
    }


def _read_balance_loss(keys: HfKeys, *, layers: int) -> float:
    """Return the coefficient for each of the layers with experts; in transformers all of them together count once.

    The loss there (Fedus et al. 2022, arXiv:2101.03961, equations 4 to 6) comes to k where loads are equal, ours to 1.
    """
    if not hf_flag(keys, "output_router_logits") or not layers:
        return 0.0
    together = hf_real(keys, "router_aux_loss_coef", low=0, most=_LARGEST_LOSS)
    return together * hf_number(keys, "num_experts_per_tok") / layers


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
        **write_rope(config, {}),
    }


def write_llama(config: DecoderConfig) -> HfKeys:
    """Return those of Llama besides."""
    if config.hidden % config.heads:
        raise ConfigError(
            "modules.language.config.hidden",
            expected=f"a multiple of heads = {config.heads}, as LlamaConfig demands whatever head_dim is",
            got=repr(config.hidden),
            fix="Write it as another family.",
        )
    return {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}


def write_mistral(config: DecoderConfig) -> HfKeys:
    """Return those of Mistral besides."""
    return {"sliding_window": config.sliding_window or None}


def write_window(config: DecoderConfig) -> HfKeys:
    """Return those of Qwen 2.5 besides."""
    window = config.sliding_window
    return {
        "use_sliding_window": bool(window),
        "sliding_window": window or None,
        "max_window_layers": 0 if window else config.layers,
    }


def _write_grids(config: DecoderConfig, more: HfKeys) -> HfKeys:
    """Return positions of a family whose rows of images always have three."""
    if not config.mrope_section:
        raise ConfigError(
            "modules.language.config.mrope_section",
            expected="numbers of turned pairs, as these models always have them",
            got="none",
            fix="Write it as another family.",
        )
    return write_rope(config, {"mrope_section": list(config.mrope_section), **more})


def write_qwen2_vl(config: DecoderConfig) -> HfKeys:
    """Return those of Qwen2-VL's text besides."""
    grids = _write_grids(config, {})
    if config.head_width * config.heads != config.hidden:
        raise ConfigError(
            "modules.language.config.head_dim",
            expected=f"hidden / heads = {config.hidden / config.heads:g}, as these models have no other",
            got=repr(config.head_width),
            fix="Write it as another family.",
        )
    return {**write_window(config), **grids}


def write_qwen3_vl(config: DecoderConfig) -> HfKeys:
    """Return those of Qwen3-VL's text besides."""
    return {"attention_bias": config.attention_bias, **_write_grids(config, {"mrope_interleaved": True})}


def write_nothing(_config: DecoderConfig) -> HfKeys:
    """Refuse to write a family that is more than a language model."""
    raise ConfigError(
        "modules.language.config",
        expected="a language model with its vision tower",
        got="a language model alone",
        fix="Write it as its text alone: qwen2_vl_text or qwen2_5_vl_text.",
    )


def write_qwen3(config: DecoderConfig) -> HfKeys:
    """Return those of Qwen 3 besides."""
    return {**write_window(config), "attention_bias": config.attention_bias}


def write_qwen3_moe(config: DecoderConfig) -> HfKeys:
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
