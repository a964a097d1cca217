"""Small configs of models of the library, by one rule for all families: what their tests and checks are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mimo_transformers.family.library import is_text_of_grids

LAYERS = 4
_SMALL: Mapping[str, int] = {
    # widths
    "hidden_size": 32,
    "n_embd": 32,
    "d_model": 32,
    "word_embed_proj_dim": 32,
    "intermediate_size": 24,
    "intermediate_size_mlp": 24,
    "ffn_dim": 24,
    "ffn_hidden_size": 24,
    "n_inner": 24,
    "moe_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "hidden_size_per_layer_input": 8,
    # heads
    "num_attention_heads": 4,
    "n_head": 4,
    "head_dim": 8,
    "v_head_dim": 8,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    # scans, short convolutions and linear attention, twice as wide as a row inside
    "num_heads": 8,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 8,
    "mamba_head_dim": 8,
    "mamba_headdim": 8,
    "mamba_d_ssm": 64,
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
    "state_size": 8,
    "ssm_state_size": 8,
    "time_step_rank": 4,
    "n_groups": 2,
    "linear_num_heads": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "lru_width": 32,
    "attention_hidden_size": 64,
    "attention_head_dim": 16,
    "adapter_rank": 8,
    "chunk_size": 4,
    "mamba_chunk_size": 4,
    "block_size": 4,
    "conv_L_cache": 3,
    # depth
    "num_hidden_layers": LAYERS,
    "n_layer": LAYERS,
    "num_layers": LAYERS,
    "first_k_dense_replace": 1,
    "attn_layer_period": 4,
    "attn_layer_offset": 2,
    # vocabulary and rows
    "vocab_size": 97,
    "sliding_window": 3,
    "window_size": 3,
    "attention_chunk_size": 3,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
}
_COUNTS = (
    *("num_hidden_layers", "n_layer", "num_layers", "first_k_dense_replace", "attn_layer_period", "attn_layer_offset"),
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    *("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "n_group", "topk_group"),
)
"""Of `_SMALL`, what says how many tensors there are."""
_OF_EXPERTS = ("moe_intermediate_size", "expert_ffn_hidden_size")
_THIN = 4
_HEADS = ("num_attention_heads", "n_head")
"""As many also where a model has less, as two ranks share them out."""
_WIDTHS = ("hidden_size", "num_layers", "window_size")
PATCHES = 4
"""Along a side of a small image."""
_SIDE, _STAGED_PATCHES = 64, 16
_BY_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type", "mlp_only_layers", "moe_layers")


def small_keys(config: Any, **changes: Any) -> dict[str, Any]:
    """Return the keys of a small ``config.json`` of the same family as a config of one model.

    Widths, heads, layers, experts, windows and vocabulary become small, each where the family has it; which layers are
    of which kind, and all else, stays.

    Args:
        config: of the library.
        changes: other values of keys. Of ``num_hidden_layers`` follows how long lists by layer are.
    """
    keys, layers = config.to_dict(), changes.get("num_hidden_layers", LAYERS)
    found = small_sizes(keys, _SMALL)
    found |= {key: _SMALL[key] for key in _HEADS if isinstance(keys.get(key), int)}
    if "depths" in keys:  # whose widths follow from one another
        found = {key: value for key, value in found.items() if key not in _WIDTHS}
    heads, shared = keys.get("num_attention_heads"), keys.get("num_key_value_heads")
    if isinstance(shared, int) and shared:
        found["num_key_value_heads"] = 4 if shared == heads else min(2, shared)
    elif "num_key_value_heads" in keys:
        found["num_key_value_heads"] = _SMALL["num_attention_heads"]
    if "head_dim" in keys:  # with latent attention it is the width that is turned by positions
        turned = "qk_rope_head_dim" if "qk_rope_head_dim" in keys else "head_dim"
        found["head_dim"] = min(keys[turned] or _SMALL[turned], _SMALL[turned])
        if turned == "head_dim" and heads and keys["head_dim"] == keys["hidden_size"] // heads:  # as of a whole row
            found["head_dim"] = found.get("hidden_size", keys["hidden_size"]) // found["num_attention_heads"]
    if is_text_of_grids(config):
        found |= _small_grids({**keys, **found})
    found |= {key: _varied(keys[key], layers) for key in _BY_LAYER if keys.get(key) and isinstance(keys[key], list)}
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if keys.get(key) is not None:
            found[key] = 0
    if keys.get("image_size"):
        found["image_size"] = small_image(keys, joined="depths" in keys)
    found["tie_word_embeddings"] = bool(keys.get("tie_word_embeddings", False))
    return {**found, **changes}


def small_sizes(keys: Mapping[str, Any], small: Mapping[str, int]) -> dict[str, Any]:
    """Return the small sizes of those keys that are larger."""
    return {key: value for key, value in small.items() if isinstance(keys.get(key), int) and keys[key] > value}


def layer_kinds(config: Any) -> int:
    """Return how many kinds of layers with a name of their own a config of one model has."""
    keys = config.to_dict()
    lists = [keys[key] for key in _BY_LAYER if isinstance(keys.get(key), list)]
    return max((len({kind for kind in kinds if isinstance(kind, str)}) for kinds in lists), default=0)


def _small_grids(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of small keys says how heads turn by three positions, each of which turns a pair of numbers or more.

    Heads of which a part is turned are wider for it.
    """
    rope = keys.get("rope_parameters") or {}
    part = rope.get("partial_rotary_factor", keys.get("partial_rotary_factor") or 1.0)
    wider = {} if part == 1.0 else {"head_dim": int(_SMALL["head_dim"] / part)}
    return {**wider, "rope_parameters": _small_sections({**keys, **wider})}


def _small_sections(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``rope_parameters`` of small keys, with sections of as many turned pairs as a head has."""
    rope = keys.get("rope_parameters") or {}
    if any(isinstance(inner, Mapping) for inner in rope.values()):  # of each kind of layers
        return {kind: _small_sections({**keys, "rope_parameters": inner}) for kind, inner in rope.items()}
    width = keys.get("head_dim") or keys["hidden_size"] // keys["num_attention_heads"]
    pairs = int(width * rope.get("partial_rotary_factor", keys.get("partial_rotary_factor") or 1.0)) // 2
    return {**rope, "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]}


def small_image(keys: Mapping[str, Any], *, joined: bool) -> int | list[int]:
    """Return a small ``image_size`` in pixels: of a few patches, and of more where later layers join them.

    Args:
        keys: of a config, with ``patch_size``.
        joined: whether they do.
    """
    size, patch = keys["image_size"], keys.get("patch_size")
    one = patch[0] if isinstance(patch, list | tuple) else patch
    side = _SIDE
    if isinstance(one, int):
        side = min(_SIDE, _STAGED_PATCHES * one) if joined else PATCHES * one
    return [side] * len(size) if isinstance(size, list | tuple) else side


def thin(config: Any) -> dict[str, Any]:
    """Return the keys of a ``config.json`` with all layers and experts of a config of the library, of small widths."""
    keys = config.to_dict()
    kept = {key: keys[key] for key in (*_COUNTS, *_BY_LAYER) if keys.get(key) is not None}
    kept |= {key: _THIN for key in _OF_EXPERTS if keys.get(key) is not None}
    return small_keys(config, **kept)


def _varied(kinds: list[Any], layers: int) -> list[Any]:
    """Return the first layers, the last of those of which there are others exchanged for each kind that is missing."""
    first = kinds[:layers]
    names = [str(kind) for kind in first]
    for kind in kinds[layers:]:
        others = [place for place, name in enumerate(names) if names.count(name) > 1]
        if str(kind) not in names and others:
            first[others[-1]], names[others[-1]] = kind, str(kind)
    return first
