"""Keys of ``config.json`` that change what `transformers` computes: each is honoured or refused, none ignored."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from mimo.hooks import CheckpointError, ConfigError
from mimo.model import DECODER, HYBRID, HfFamily, LanguageModelSpec, Stage
from mimo.model.runtime import LanguageBatch, read_hf
from mimo.testing.comparison import NEMOTRON, draw, saved

FULL, SLIDING = "full_attention", "sliding_attention"
TOKENS = torch.arange(19) * 7 % 31
SIZES: Mapping[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 31,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
STATES: Mapping[str, Any] = {"vocab_size": 31, "hidden_size": 24, "n_groups": 2, "conv_kernel": 3, "pad_token_id": 0}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": SIZES,
    "mistral": {**SIZES, "sliding_window": 5},
    "qwen2": SIZES,
    "qwen3": {**SIZES, "head_dim": 12},
    "qwen3_moe": {**SIZES, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
    "nemotron_h": {**STATES, **NEMOTRON, "time_step_min": 0.2},
    "mamba2": {**STATES, "num_hidden_layers": 2, "num_heads": 6, "head_dim": 8, "state_size": 6},
}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_ROPES: Sequence[Mapping[str, Any]] = (
    {"rope_type": "linear", "factor": 3.0},
    {"type": "linear", "factor": 2.0, "rope_theta": 77.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 8},
    {"rope_type": "longrope", "factor": 3.0, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6},
    {**_LLAMA3, "original_max_position_embeddings": 32},
    _LLAMA3,
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    {"rope_theta": 50.0},
    {FULL: {"rope_type": "default", "rope_theta": 50.0}, SLIDING: {"rope_type": "default", "rope_theta": 20.0}},
)
_WINDOW: Mapping[str, Any] = {"use_sliding_window": True, "sliding_window": 3}
MORE: Sequence[Mapping[str, Any]] = (
    *({"rope_scaling": rope} for rope in _ROPES),
    *({"rope_parameters": rope} for rope in _ROPES),
    {"rope_scaling": {**_LLAMA3, "original_max_position_embeddings": 32}, "original_max_position_embeddings": 9},
    {"rope_theta": 50.0},
    {"partial_rotary_factor": 0.5},
    {"sliding_window": 3},
    *({**_WINDOW, "max_window_layers": full} for full in (0, 1, 2, 5)),
    *({**_WINDOW, "layer_types": [one, other]} for one in (FULL, SLIDING) for other in (FULL, SLIDING)),
    {"layer_types": [SLIDING, SLIDING]},
    {"layer_types": [SLIDING, FULL]},
    {"is_causal": False},
    {"attention_bias": True},
    {"mlp_bias": True},
    {"head_dim": 6},
    {"norm_topk_prob": True},
    {"mamba_dt_min": 0.5},
    {"mamba_dt_limit": [0.5, 0.6]},
    {"time_step_limit": [0.5, 0.6]},
    {"mamba_conv_bias": False},
    {"num_local_experts": 4},
)
"""Beside the numbers and names that a folder has anyhow, each of which is changed too."""


def changes(base: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield what to change of a ``config.json``, one thing at a time."""
    yield from MORE
    for key, value in base.items():
        if isinstance(value, bool):
            yield {key: not value}
        elif isinstance(value, int):
            yield from ({key: value + 1}, {key: 1})
        elif isinstance(value, float):
            yield {key: 3 * value + 0.1}
        elif isinstance(value, str) and "act" in key:
            yield from ({key: "gelu"}, {key: "relu"})


@torch.no_grad()
def theirs_of(folder: Path, keys: Mapping[str, Any], weights: Mapping[str, Tensor] | None = None) -> Any:
    """Return the model that `transformers` makes of a ``config.json``, with these weights; None where it can't."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(keys))
    load: Any = transformers.AutoModelForCausalLM
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        model = load.from_config(config, attn_implementation="eager").eval()
        if weights is not None:
            model.load_state_dict(weights)
        model(TOKENS[None])
    except Exception:  # noqa: BLE001  # it refuses in any way
        return None
    return model


def spec_of(model_type: str) -> tuple[LanguageModelSpec, HfFamily]:
    """Return who reads a family."""
    return next((spec, family) for spec in (DECODER, HYBRID) for family in spec.hf if family.model_type == model_type)


@torch.no_grad()
def ours_of(model_type: str, keys: Mapping[str, Any], files: Mapping[str, Tensor]) -> Tensor | None:
    """Return the logits of the module that ours makes of a ``config.json``; None where it is refused."""
    spec, family = spec_of(model_type)
    try:
        config = spec.config(**family.settings(keys))
        module: Any = spec.build(config, Stage())
        read_hf(module, family, config, files)
    except (ConfigError, CheckpointError, KeyError, ZeroDivisionError):  # of which the commands make the first
        return None
    batch = LanguageBatch.of(TOKENS, torch.full_like(TOKENS, -100), torch.arange(19), lengths=(19,))
    logits: Tensor = module.logits(module(batch, {}, None))
    return logits


@torch.no_grad()
@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
@pytest.mark.parametrize("model_type", MODELS)
def test_no_key_that_counts_is_passed_over(model_type: str, tmp_path: Path) -> None:
    """With the same weights, `transformers` computes other logits: so does ours, the same ones, or it refuses."""
    keys = {**MODELS[model_type], "model_type": model_type}
    model = theirs_of(tmp_path / "there", keys)
    draw([*model.parameters(), *(buffer for name, buffer in model.named_buffers() if "inv_freq" not in name)])
    weights, plain = copy.deepcopy(model.state_dict()), model(TOKENS[None]).logits[0]
    files = saved(model, tmp_path / "there")
    base = json.loads((tmp_path / "there" / "config.json").read_text())
    counts = 0
    for change in changes(base):
        changed = {**base, **change}
        if "rope_scaling" in change or "rope_theta" in change:
            changed.pop("rope_parameters", None)  # which goes before
        given = theirs_of(tmp_path / "changed", changed, weights)
        if given is None:
            continue
        expected, found = given(TOKENS[None]).logits[0], ours_of(model_type, changed, files)
        counts += not torch.allclose(expected, plain, atol=1e-5)
        if found is not None:
            torch.testing.assert_close(
                found, expected, rtol=1e-3, atol=1e-3 * float(plain.abs().max()), msg=str(change)
            )
    assert counts > 1  # the comparison sees it
