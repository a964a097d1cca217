"""Where published Whisper folders hold the encoder: alone, or below a model with a decoder, which is passed over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mimo.model import HfFamily, HfTensor, hf_no_dropout, hf_number, hf_only, hf_rate
from mimo_encoder_audio._config import WhisperConfig

_SETTINGS = {
    "mels": "num_mel_bins",
    "width": "d_model",
    "layers": "encoder_layers",
    "heads": "encoder_attention_heads",
    "intermediate": "encoder_ffn_dim",
    "positions": "max_source_positions",
}
_ONLY: Mapping[str, Any] = {  # what ours can't do otherwise
    "activation_function": "gelu",
}
_RATES = ("dropout", "activation_dropout")
"""Keys that drop features of rows, under ours' names."""
_REFUSED = ("attention_dropout", "encoder_layerdrop")
"""Weights of attention, and whole layers. The library leaves out a layer for all clips of a batch at once, so which
clips train it would depend on how they are spread over ranks and microbatches."""


def _settings(published: Mapping[str, Any]) -> Mapping[str, Any]:
    for key, value in _ONLY.items():
        hf_only(published, key, [value])
    hf_no_dropout(published, _REFUSED)
    sizes = {ours: hf_number(published, theirs) for ours, theirs in _SETTINGS.items() if theirs in published}
    return {**sizes, **{key: hf_rate(published, key) for key in _RATES if key in published}}


def _describe(config: WhisperConfig) -> Mapping[str, Any]:
    # Whoever loads the folder as a whole Whisper gets a new decoder, whose heads must divide the width too.
    decoder = {"decoder_attention_heads": config.heads}
    return (
        {theirs: getattr(config, ours) for ours, theirs in _SETTINGS.items()}
        | decoder
        | dict(_ONLY)
        | {key: getattr(config, key) for key in _RATES}
        | dict.fromkeys(_REFUSED, 0.0)
    )


def _tensors(config: WhisperConfig) -> Sequence[HfTensor]:
    table = [HfTensor(ours="positions.weight", theirs="embed_positions.weight")]
    for name, inputs in (("conv1", config.mels), ("conv2", config.width)):
        weight, bias = f"{name}.weight", f"{name}.bias"
        table.append(HfTensor(ours=weight, theirs=weight, shape=(config.width, inputs, 3), dims=(0, 2, 1)))
        table.append(HfTensor(ours=bias, theirs=bias))
    pairs = {
        "attention_norm": "self_attn_layer_norm",
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.output": "self_attn.out_proj",
        "mlp_norm": "final_layer_norm",
        "mlp.up": "fc1",
        "mlp.down": "fc2",
    }
    named = {
        f"layers.{i}.{ours}": f"layers.{i}.{theirs}" for i in range(config.layers) for ours, theirs in pairs.items()
    }
    for ours, theirs in (named | {"norm": "layer_norm"}).items():
        leaves = ("weight",) if ours.endswith("attention.key") else ("weight", "bias")
        table += [HfTensor(ours=f"{ours}.{leaf}", theirs=f"{theirs}.{leaf}") for leaf in leaves]
    return table


WHISPER_HF = HfFamily(
    model_type="whisper",
    architecture="WhisperForAudioClassification",
    settings=_settings,
    describe=_describe,
    tensors=_tensors,
    renamed=({"": "encoder."}, {"": "model.encoder."}, {}),
    dropout=(*_RATES, *_REFUSED),
    ignored=("decoder.*", "model.decoder.*", "proj_out.weight", "projector.*", "classifier.*", "layer_weights"),
)
