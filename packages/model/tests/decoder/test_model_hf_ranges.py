"""Numbers of a published ``config.json`` that mean nothing are refused by their key, in each family."""

from __future__ import annotations

from typing import Any

import pytest

from mimo.hooks import ConfigError
from mimo.model import DECODER, HYBRID

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
SETTINGS = {family.model_type: family.settings for spec in (DECODER, HYBRID) for family in spec.hf}
PATTERN = {"hybrid_override_pattern": "ME*"}


@pytest.mark.parametrize(
    ("model_type", "keys", "text"),
    [
        *(
            ("llama", {key: value}, f"{key}: expected at least 1, got {value}")
            for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
            for value in (0, -3)
        ),
        ("llama", {"num_key_value_heads": 0}, "num_key_value_heads: expected at least 1, got 0"),
        ("llama", {"num_key_value_heads": 5}, "num_key_value_heads: expected a divisor of num_attention_heads = 32"),
        ("llama", {"head_dim": -8}, "head_dim: expected at least 1, got -8"),
        ("llama", {"rms_norm_eps": 0}, "rms_norm_eps: expected a number above 0 and up to 0.1, got 0"),
        ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps: expected a number above 0 and up to 0.1, got '1e-5'"),
        ("llama", {"rms_norm_eps": True}, "rms_norm_eps: expected a number above 0 and up to 0.1, got True"),
        ("llama", {"rope_theta": float("inf")}, "rope_theta: expected a number from 1 to 1e+15, got inf"),
        ("llama", {"rope_theta": -1.0}, "rope_theta: expected a number from 1 to 1e+15, got -1.0"),
        (
            "llama",
            {"rope_scaling": {**LLAMA3, "factor": 0.5}},
            "rope_scaling.factor: expected a number from 1 to 1e+06",
        ),
        (
            "llama",
            {"rope_parameters": {**LLAMA3, "low_freq_factor": 0}},
            "rope_parameters.low_freq_factor: expected a number above 0 and up to 1e+06, got 0",
        ),
        (
            "llama",
            {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}},
            "rope_scaling.high_freq_factor: expected more than low_freq_factor = 1.0, got 1.0",
        ),
        (
            "llama",
            {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 0}},
            "rope_scaling.original_max_position_embeddings: expected at least 1, got 0",
        ),
        ("mistral", {"sliding_window": -1}, "sliding_window: expected at least 1, got -1"),
        (
            "qwen2",
            {"use_sliding_window": True, "max_window_layers": -1},
            "max_window_layers: expected at least 0, got -1",
        ),
        (
            "qwen2_vl",
            {"rope_scaling": {"type": "mrope", "mrope_section": [16, -8, 24]}},
            "rope_scaling.mrope_section: expected at least 0, got -8",
        ),
        (
            "qwen3_moe",
            {**EXPERTS, "num_experts_per_tok": 5},
            "num_experts_per_tok: expected at most num_experts = 4, got 5",
        ),
        (
            "qwen3_moe",
            {**EXPERTS, "output_router_logits": True, "router_aux_loss_coef": -1.0},
            "router_aux_loss_coef: expected a number from 0 to 1e+06, got -1.0",
        ),
        ("qwen3_moe", {**EXPERTS, "moe_intermediate_size": 0}, "moe_intermediate_size: expected at least 1, got 0"),
        (
            "qwen3_moe",
            {**EXPERTS, "num_hidden_layers": 1, "mlp_only_layers": [0, 1]},
            "mlp_only_layers: expected the first layers",
        ),
        ("mamba2", {"layer_norm_epsilon": 1e12}, "layer_norm_epsilon: expected a number above 0 and up to 0.1"),
        (
            "mamba2",
            {"time_step_limit": [-1.0, 2.0]},
            "time_step_limit: expected two numbers from 0, the lower one first",
        ),
        ("mamba2", {"state_size": 0}, "state_size: expected at least 1, got 0"),
        ("nemotron_h", {**PATTERN, "time_step_min": -1.0}, "time_step_min: expected a number from 0 to 1, got -1.0"),
        (
            "nemotron_h",
            {**PATTERN, "routed_scaling_factor": 0},
            "routed_scaling_factor: expected a number above 0 and up to 1000, got 0",
        ),
        (
            "nemotron_h",
            {**PATTERN, "num_experts_per_tok": 9},
            "num_experts_per_tok: expected at most n_routed_experts = 8, got 9",
        ),
    ],
)
def test_numbers_that_mean_nothing_are_refused_by_their_key(model_type: str, keys: dict[str, Any], text: str) -> None:
    """Beside what the family's other keys mean where they are left out."""
    SETTINGS[model_type](PATTERN if model_type == "nemotron_h" else {})
    with pytest.raises(ConfigError) as caught:
        SETTINGS[model_type](keys)
    assert str(caught.value).startswith(f"config.json: {text}")


@pytest.mark.parametrize("keys", [{"sliding_window": None}, {"sliding_window": 0}, {"rms_norm_eps": 1e-12}])
def test_numbers_at_the_rim_are_honoured(keys: dict[str, Any]) -> None:
    """What other folders say stays."""
    found = SETTINGS["mistral"](keys)
    assert (found["sliding_window"], found["norm_eps"]) == (
        keys.get("sliding_window", 4096) or 0,
        keys.get("rms_norm_eps", 1e-6),
    )
