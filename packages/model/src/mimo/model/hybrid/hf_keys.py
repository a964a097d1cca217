"""What the keys of a published ``config.json`` and the settings of ``hybrid`` mean to each other, by family.

Reading refuses, by its key, what the hybrid can't do. Writing tells what the family has keys for, and no more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mimo.hooks import ConfigError
from mimo.model.hybrid.config import ATTENTION, EXPERTS, MAMBA, MLP, HybridConfig
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

_KINDS = {
    "linear_attention": MAMBA,
    "mamba": MAMBA,
    "moe": EXPERTS,
    "full_attention": ATTENTION,
    "attention": ATTENTION,
    "mlp": MLP,
}
"""Names of layers in ``layers_block_type``, those of older folders too."""
WRITTEN_KINDS = {letter: name for name, letter in reversed(_KINDS.items())}
_NO_LIMIT = (0.0, math.inf)
_LONGEST_STEP = 1.0  # of the least step; published ones are 1e-3
_LARGEST_SCALE = 1e3  # of what experts' shares are multiplied by; published ones are 16 at most
_OF_MAMBA = {"mamba_groups": "n_groups", "mamba_taps": "conv_kernel", "mamba_chunk": "chunk_size"}
_OF_NEMOTRON = {**_OF_MAMBA, "mamba_heads": "mamba_num_heads", "mamba_state": "ssm_state_size"}

# What a key means that a folder leaves out, as sections of composed models do; by transformers' classes of configs.
_LEFT_OUT: HfKeys = {
    "hidden_size": 4096,
    "layer_norm_epsilon": 1e-5,
    "n_groups": 8,
    "conv_kernel": 4,
    "use_conv_bias": True,
}
_LEFT_OUT_OF_MAMBA: HfKeys = {
    **_LEFT_OUT,
    "vocab_size": 32_768,
    "num_hidden_layers": 64,
    "num_heads": 128,
    "head_dim": 64,
    "state_size": 128,
    "chunk_size": 256,
}
_LEFT_OUT_OF_NEMOTRON: HfKeys = {
    **_LEFT_OUT,
    "vocab_size": 131_072,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 21_504,
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "time_step_min": 1e-3,
    "chunk_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
_OLD_NAMES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_chunk_size": "chunk_size",
    "num_local_experts": "n_routed_experts",
    "layer_types": "layers_block_type",
}
"""Further names of keys of Nemotron-H, which are taken for these."""


def _read_pattern(keys: HfKeys) -> str:
    kinds, pattern = keys.get("layers_block_type"), keys.get("hybrid_override_pattern")
    if kinds is None:
        if not isinstance(pattern, str):
            raise hf_refused("layers_block_type", "the kind of each layer", kinds)
        return pattern
    unknown = [kind for kind in kinds if kind not in _KINDS]
    if unknown:
        raise hf_refused("layers_block_type", f"layers of the kinds {', '.join(_KINDS)}", unknown[0])
    return "".join(_KINDS[kind] for kind in kinds)


def read_nemotron(published: HfKeys) -> dict[str, Any]:
    """Return the settings that a folder of Nemotron-H decides."""
    renamed = {theirs: published[old] for old, theirs in _OLD_NAMES.items() if old in published}
    keys = {**_LEFT_OUT_OF_NEMOTRON, **published, **renamed}
    hf_only(keys, "residual_in_fp32", [False])
    hf_only(keys, "sliding_window", [None])
    pattern = _read_pattern(keys)
    found: dict[str, Any] = {
        "vocabulary": hf_number(keys, "vocab_size"),
        "hidden": hf_number(keys, "hidden_size"),
        "pattern": pattern,
        "norm_eps": hf_small(keys, "layer_norm_epsilon"),
        "tied": hf_flag(keys, "tie_word_embeddings"),
    }
    if MAMBA in pattern:
        hf_only(keys, "mamba_hidden_act", ["silu"])
        for key in ("time_step_limit", "mamba_dt_limit"):
            if keys.get(key) is not None and tuple(map(_float, keys[key])) != _NO_LIMIT:
                raise hf_refused(key, "no limit, as time_step_min is the one that counts", keys[key])
        found |= {ours: hf_number(keys, theirs) for ours, theirs in _OF_NEMOTRON.items()}
        found |= {
            "mamba_head_dim": hf_number(keys, "mamba_head_dim"),
            "mamba_bias": hf_flag(keys, "use_bias"),
            "mamba_conv_bias": hf_flag(keys, "use_conv_bias"),
            "mamba_step_low": hf_real(keys, "time_step_min", low=0, most=_LONGEST_STEP),
        }
    if ATTENTION in pattern:
        hf_only(keys, "attention_bias", [False])
        hf_no_dropout(keys, ["attention_dropout"])
        hf_only(keys, "is_causal", [True])
        found |= {
            "heads": hf_number(keys, "num_attention_heads"),
            "kv_heads": hf_divisor(keys, "num_key_value_heads", of="num_attention_heads"),
            "head_dim": hf_number(keys, "head_dim"),
        }
    if {MLP, EXPERTS} & set(pattern):
        hf_only(keys, "mlp_hidden_act", ["relu2"])
        found |= {"activation": "relu2", "mlp_bias": hf_flag(keys, "mlp_bias")}
    if MLP in pattern:
        found["intermediate"] = hf_number(keys, "intermediate_size")
    if EXPERTS in pattern:
        _check_experts(keys)
        found |= {
            "experts": hf_number(keys, "n_routed_experts"),
            "experts_per_token": hf_number(keys, "num_experts_per_tok"),
            "expert_intermediate": hf_number(keys, "moe_intermediate_size"),
            "shared_intermediate": hf_number(keys, "moe_shared_expert_intermediate_size"),
            "router_score": "sigmoid",
            "router_normalize": hf_flag(keys, "norm_topk_prob"),
            "router_scale": hf_real(keys, "routed_scaling_factor", low=0, most=_LARGEST_SCALE, above=True),
            "router_bias": True,
        }
    return found


def _check_experts(keys: HfKeys) -> None:
    for key in ("n_group", "topk_group", "n_shared_experts"):
        hf_only(keys, key, [1])
    hf_only(keys, "moe_latent_size", [None])
    chosen, experts = hf_number(keys, "num_experts_per_tok"), hf_number(keys, "n_routed_experts")
    if chosen > experts:
        raise hf_refused("num_experts_per_tok", f"at most n_routed_experts = {experts}", chosen)
    if not keys["moe_shared_expert_intermediate_size"]:
        raise hf_refused("moe_shared_expert_intermediate_size", "a shared expert", 0)


def write_nemotron(config: HybridConfig) -> dict[str, Any]:
    """Return the keys of Nemotron-H."""
    decoder = config.decoder
    return {
        "vocab_size": config.vocabulary,
        "hidden_size": config.hidden,
        "layers_block_type": [WRITTEN_KINDS[letter] for letter in config.pattern],
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "residual_in_fp32": False,
        **{theirs: getattr(config, ours) for ours, theirs in _OF_NEMOTRON.items()},
        "mamba_head_dim": config.mamba_head_dim,
        "mamba_hidden_act": "silu",
        "use_bias": config.mamba_bias,
        "use_conv_bias": config.mamba_conv_bias,
        "time_step_min": config.mamba_step_low,
        "num_attention_heads": decoder.heads,
        "num_key_value_heads": decoder.key_value_heads,
        "head_dim": decoder.head_width,
        "attention_bias": False,
        "mlp_hidden_act": "relu2",
        "mlp_bias": config.mlp_bias,
        "intermediate_size": config.intermediate,
        "n_routed_experts": config.experts or 8,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": decoder.expert_intermediate or config.intermediate,
        "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": config.shared_intermediate or config.intermediate,
        "norm_topk_prob": config.router_normalize,
        "routed_scaling_factor": config.router_scale,
        "n_group": 1,
        "topk_group": 1,
    }


def read_mamba(published: HfKeys) -> dict[str, Any]:
    """Return the settings that a folder of Mamba-2 decides."""
    keys = {**_LEFT_OUT_OF_MAMBA, **published}
    hf_only(keys, "hidden_act", ["silu"])
    low, high = (_float(limit) for limit in keys.get("time_step_limit") or _NO_LIMIT)
    if not 0 <= low < high:
        raise hf_refused("time_step_limit", "two numbers from 0, the lower one first", keys["time_step_limit"])
    return {
        "vocabulary": hf_number(keys, "vocab_size"),
        "hidden": hf_number(keys, "hidden_size"),
        "pattern": MAMBA * hf_number(keys, "num_hidden_layers"),
        "norm_eps": hf_small(keys, "layer_norm_epsilon"),
        "tied": hf_flag(keys, "tie_word_embeddings"),
        **{ours: hf_number(keys, theirs) for ours, theirs in _OF_MAMBA.items()},
        "mamba_heads": hf_number(keys, "num_heads"),
        "mamba_head_dim": hf_number(keys, "head_dim"),
        "mamba_state": hf_number(keys, "state_size"),
        "mamba_bias": hf_flag(keys, "use_bias"),
        "mamba_conv_bias": hf_flag(keys, "use_conv_bias"),
        "mamba_step_low": low,
        "mamba_step_high": high,
    }


def write_mamba(config: HybridConfig) -> dict[str, Any]:
    """Return the keys of Mamba-2."""
    if config.mamba_width % config.hidden:
        raise ConfigError(
            "modules.language.config.mamba_heads",
            expected=f"heads whose columns are a multiple of hidden = {config.hidden}, as 'mamba2' has",
            got=f"{config.mamba_heads} of mamba_head_dim = {config.mamba_head_dim}",
            fix="Write it as another family.",
        )
    return {
        "vocab_size": config.vocabulary,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "expand": config.mamba_width // config.hidden,
        **{theirs: getattr(config, ours) for ours, theirs in _OF_MAMBA.items()},
        "num_heads": config.mamba_heads,
        "head_dim": config.mamba_head_dim,
        "state_size": config.mamba_state,
        "hidden_act": "silu",
        "use_bias": config.mamba_bias,
        "use_conv_bias": config.mamba_conv_bias,
        "residual_in_fp32": False,
        **_write_limit(config.mamba_step_low, config.mamba_step_high),
    }


def _float(value: Any) -> float:
    """Return a number of ``config.json``, in which infinity has several forms."""
    return float(value["__float__"] if isinstance(value, Mapping) else value)


def _write_limit(low: float, high: float) -> dict[str, Any]:
    """Return the key of the limit of steps, but for what it means when it is left out: JSON knows no infinity."""
    if (low, high) == _NO_LIMIT:
        return {}
    return {"time_step_limit": [low, {"__float__": "Infinity"} if math.isinf(high) else high]}  # as transformers 5 does
