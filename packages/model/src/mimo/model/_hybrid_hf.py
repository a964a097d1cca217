"""The published families that ``hybrid`` can read and write: Nemotron-H, with or without experts, and Mamba-2.

Their config.json name things differently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import attrs

from mimo.hooks import ConfigError
from mimo.model._hf import HfFamily
from mimo.model._hf_keys import number, only, refuse
from mimo.model._hybrid_config import ATTENTION, EXPERTS, MAMBA, MLP, HybridConfig
from mimo.model._hybrid_hf_tensors import hybrid_tensors, nemotron_tensors

Keys: TypeAlias = Mapping[str, Any]
"""Of a ``config.json``."""

_KINDS = {
    "linear_attention": MAMBA,
    "mamba": MAMBA,
    "moe": EXPERTS,
    "full_attention": ATTENTION,
    "attention": ATTENTION,
    "mlp": MLP,
}
"""Names of layers in ``layers_block_type``, those of older folders too."""
_WRITTEN_KINDS = {letter: name for name, letter in reversed(_KINDS.items())}
_UNWRITTEN = frozenset(
    {"expert_bias_rate", "balance_loss", "z_loss", "next_tokens", "next_tokens_loss", "next_tokens_pattern"}
)
"""Said where a model is trained, not in what it is."""
_OF_MAMBA = {"mamba_groups": "n_groups", "mamba_taps": "conv_kernel", "mamba_chunk": "chunk_size"}
_OF_NEMOTRON = {**_OF_MAMBA, "mamba_heads": "mamba_num_heads", "mamba_state": "ssm_state_size"}


def _read_pattern(keys: Keys) -> str:
    kinds, pattern = keys.get("layers_block_type"), keys.get("hybrid_override_pattern")
    if kinds is None:
        if not isinstance(pattern, str):
            raise refuse("layers_block_type", "the kind of each layer", kinds)
        return pattern
    unknown = [kind for kind in kinds if kind not in _KINDS]
    if unknown:
        raise refuse("layers_block_type", f"layers of the kinds {', '.join(_KINDS)}", unknown[0])
    return "".join(_KINDS[kind] for kind in kinds)


def _read_nemotron(keys: Keys) -> dict[str, Any]:
    only(keys, "residual_in_fp32", [False])
    only(keys, "sliding_window", [None])
    pattern = _read_pattern(keys)
    found: dict[str, Any] = {
        "vocabulary": number(keys, "vocab_size"),
        "hidden": number(keys, "hidden_size"),
        "pattern": pattern,
        "norm_eps": keys.get("layer_norm_epsilon", 1e-5),
        "tied": bool(keys.get("tie_word_embeddings")),
    }
    if MAMBA in pattern:
        only(keys, "mamba_hidden_act", ["silu"])
        found |= {ours: number(keys, theirs) for ours, theirs in _OF_NEMOTRON.items()}
        found |= {
            "mamba_head_dim": number(keys, "mamba_head_dim"),
            "mamba_bias": bool(keys.get("use_bias")),
            "mamba_conv_bias": bool(keys.get("use_conv_bias", True)),
            "mamba_step_low": keys.get("time_step_min", 1e-3),
        }
    if ATTENTION in pattern:
        only(keys, "attention_bias", [False])
        only(keys, "attention_dropout", [0.0])
        found |= {
            "heads": number(keys, "num_attention_heads"),
            "kv_heads": keys.get("num_key_value_heads") or number(keys, "num_attention_heads"),
            "head_dim": number(keys, "head_dim"),
        }
    if {MLP, EXPERTS} & set(pattern):
        only(keys, "mlp_hidden_act", ["relu2"])
        found |= {"activation": "relu2", "mlp_bias": bool(keys.get("mlp_bias"))}
    if MLP in pattern:
        found["intermediate"] = number(keys, "intermediate_size")
    if EXPERTS in pattern:
        for key in ("n_group", "topk_group", "n_shared_experts"):
            only(keys, key, [1])
        only(keys, "moe_latent_size", [None])
        found |= {
            "experts": number(keys, "n_routed_experts"),
            "experts_per_token": number(keys, "num_experts_per_tok"),
            "expert_intermediate": number(keys, "moe_intermediate_size"),
            "shared_intermediate": number(keys, "moe_shared_expert_intermediate_size"),
            "router_score": "sigmoid",
            "router_normalize": bool(keys.get("norm_topk_prob", True)),
            "router_scale": keys.get("routed_scaling_factor", 1.0),
            "router_bias": True,
        }
    return found


def _write_nemotron(config: HybridConfig) -> dict[str, Any]:
    decoder = config.decoder
    return {
        "vocab_size": config.vocabulary,
        "hidden_size": config.hidden,
        "layers_block_type": [_WRITTEN_KINDS[letter] for letter in config.pattern],
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


def _read_mamba(keys: Keys) -> dict[str, Any]:
    only(keys, "hidden_act", ["silu"])
    low, high = (_float(limit) for limit in keys.get("time_step_limit") or (0.0, math.inf))
    return {
        "vocabulary": number(keys, "vocab_size"),
        "hidden": number(keys, "hidden_size"),
        "pattern": MAMBA * number(keys, "num_hidden_layers"),
        "norm_eps": keys.get("layer_norm_epsilon", 1e-5),
        "tied": bool(keys.get("tie_word_embeddings")),
        **{ours: number(keys, theirs) for ours, theirs in _OF_MAMBA.items()},
        "mamba_heads": number(keys, "num_heads"),
        "mamba_head_dim": number(keys, "head_dim"),
        "mamba_state": number(keys, "state_size"),
        "mamba_bias": bool(keys.get("use_bias")),
        "mamba_conv_bias": bool(keys.get("use_conv_bias", True)),
        "mamba_step_low": low,
        "mamba_step_high": high,
    }


def _write_mamba(config: HybridConfig) -> dict[str, Any]:
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
    if (low, high) == (0.0, math.inf):
        return {}
    return {"time_step_limit": [low, {"__float__": "Infinity"} if math.isinf(high) else high]}  # as transformers 5 does


def _describe(
    config: HybridConfig,
    *,
    family: str,
    read: Callable[[Keys], Mapping[str, Any]],
    write: Callable[[HybridConfig], Keys],
) -> Keys:
    """Return what a folder says of ``config``, having made sure that it says all of it."""
    written = write(config)
    kept = {name: getattr(config, name) for name in _UNWRITTEN}
    back = _resolved(HybridConfig(**{**read(written), **kept}))
    for field in attrs.fields(HybridConfig):
        ours, theirs = getattr(_resolved(config), field.name), getattr(back, field.name)
        if ours != theirs:
            raise ConfigError(
                f"modules.language.config.{field.name}",
                expected=f"{theirs!r}, as models of the family {family!r} have no other",
                got=repr(ours),
                fix="Write it as another family.",
            )
    return written


def _resolved(config: HybridConfig) -> HybridConfig:
    """Return the same model with nothing left to follow from something else."""
    decoder, fields = config.decoder, attrs.fields(HybridConfig)
    found: dict[str, Any] = {}
    if ATTENTION in config.pattern:
        found |= {"kv_heads": decoder.key_value_heads, "head_dim": decoder.head_width}
    if EXPERTS in config.pattern:
        found["expert_intermediate"] = config.expert_intermediate or config.intermediate
        found["router_bias"] = config.router_bias or config.expert_bias_rate > 0
    if MLP not in config.pattern:
        found["intermediate"] = fields.intermediate.default
    return attrs.evolve(config, **found)


def _describe_further(config: HybridConfig) -> Keys:
    """Return what a folder says of what predicts further tokens: `transformers` has names of layers, others letters."""
    return {
        "num_nextn_predict_layers": config.next_tokens,
        "mtp_layers_block_type": [_WRITTEN_KINDS[letter] for letter in config.next_pattern],
        "mtp_hybrid_override_pattern": config.next_pattern,
    }


def _family(
    model_type: str,
    architecture: str,
    read: Callable[[Keys], Mapping[str, Any]],
    write: Callable[[HybridConfig], Keys],
    renamed: Sequence[Mapping[str, str]],
    **more: Any,
) -> HfFamily:
    return HfFamily(
        model_type=model_type,
        architecture=architecture,
        settings=read,
        describe=partial(_describe, family=model_type, read=read, write=write),
        renamed=renamed,
        ignored=("mtp.*", "*.mtp.*"),
        copies=lambda config: {"lm_head.weight": "backbone.embeddings.weight"} if config.tied else {},
        **more,
    )


NEMOTRON_H = _family(
    "nemotron_h",
    "NemotronHForCausalLM",
    _read_nemotron,
    _write_nemotron,
    ({}, {"backbone.": "model."}, {"": "language_model."}),
    tensors=nemotron_tensors,
    beside=_describe_further,
)
MAMBA2 = _family(
    "mamba2",
    "Mamba2ForCausalLM",
    _read_mamba,
    _write_mamba,
    ({}, {"backbone.embeddings.": "backbone.embedding."}),
    tensors=hybrid_tensors,
)
HYBRID_HF = (NEMOTRON_H, MAMBA2)
