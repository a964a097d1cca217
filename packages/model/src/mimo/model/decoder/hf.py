"""The published families that ``decoder`` can read and write: Llama, Mistral, Qwen 2 to 3, the text of their VLs.

All have the same table of tensors. What sets a family apart is which keys of its ``config.json`` say what; a setting
that its keys can't express is found by reading back what was written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs

from mimo.hooks import ConfigError
from mimo.model.decoder.config import DecoderConfig
from mimo.model.decoder.hf_keys import (
    DROPOUT,
    UNREAD,
    read_common,
    read_llama,
    read_mistral,
    read_qwen2,
    read_qwen3,
    read_qwen3_moe,
    read_qwen3_vl,
    write_common,
    write_llama,
    write_mistral,
    write_nothing,
    write_qwen2_vl,
    write_qwen3,
    write_qwen3_moe,
    write_qwen3_vl,
    write_window,
)
from mimo.model.decoder.hf_rope import Grids
from mimo.model.spec import HF_CARRIED, HfFamily, HfKeys, HfTensor

_HEADLESS = (
    "transformers has no class of this family that reads text alone and has a head: {0} gives hidden rows, of which "
    "lm_head.weight, or where it is tied model.embed_tokens.weight, makes the logits"
)
_UNWRITTEN = frozenset({"balance_loss", "z_loss", "next_tokens", "next_tokens_loss"})
"""Settings of training, which are not written; MTP modules begin new, and are left out."""


def _describe(
    config: DecoderConfig,
    *,
    family: str,
    settings: Callable[[HfKeys], Mapping[str, Any]],
    write: Callable[[DecoderConfig], HfKeys],
    unwritten: frozenset[str],
) -> HfKeys:
    """Return what a folder says of ``config``, having made sure that it says all of it."""
    written = {**write_common(config), **write(config)}
    others = {name: getattr(config, name) for name in _UNWRITTEN | unwritten}
    back = _resolved(DecoderConfig(**{**settings(written), **others}))
    for field in attrs.fields(DecoderConfig):
        ours, theirs = getattr(_resolved(config), field.name), getattr(back, field.name)
        if ours != theirs:
            raise ConfigError(
                f"modules.language.config.{field.name}",
                expected=f"{theirs!r}, as models of the family {family!r} have no other",
                got=repr(ours),
                fix="Write it as another family.",
            )
    return written


def _resolved(config: DecoderConfig) -> DecoderConfig:
    """Return the same model with nothing left to follow from something else."""
    width = config.expert_intermediate or config.intermediate if config.experts else 0
    return attrs.evolve(
        config,
        kv_heads=config.key_value_heads,
        head_dim=config.head_width,
        expert_intermediate=width,
        intermediate=UNREAD if config.experts and not config.dense_layers else config.intermediate,
    )


def decoder_tensors(config: DecoderConfig) -> list[HfTensor]:
    """Return the table of all families."""
    found = [
        HfTensor(ours="embedding.weight", theirs="model.embed_tokens.weight"),
        HfTensor(ours="norm.weight", theirs="model.norm.weight"),
    ]
    if not config.tied:
        found.append(HfTensor(ours="head.weight", theirs="lm_head.weight"))
    attention = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
    norms = {"query_norm": "q_norm", "key_norm": "k_norm"} if config.query_key_norm else {}
    for layer in range(config.layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        names = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
        names |= {f"attention.{one}": f"self_attn.{other}" for one, other in {**attention, **norms}.items()}
        biased = {f"attention.{one}" for one in attention if one != "output" or config.attention_bias}
        biased = biased if config.biased_inputs else set()
        if layer in config.expert_layers:
            names["mlp.router"] = "mlp.gate"
            found += [
                HfTensor(
                    ours=f"{ours}.mlp.experts.{part}.weight",
                    theirs=tuple(f"{theirs}.mlp.experts.{one}.{part}_proj.weight" for one in range(config.experts)),
                )
                for part in ("gate", "up", "down")
            ]
        else:
            dense = {f"mlp.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
            names |= dense
            biased |= dense.keys() if config.mlp_bias else set()
        for one, other in names.items():
            leaves = ("weight", "bias") if one in biased else ("weight",)
            found += [HfTensor(ours=f"{ours}.{one}.{leaf}", theirs=f"{theirs}.{other}.{leaf}") for leaf in leaves]
    return found


def _family(
    model_type: str,
    architecture: str,
    read: Callable[[HfKeys], Mapping[str, Any]],
    write: Callable[[DecoderConfig], HfKeys],
    left_out: HfKeys,
    *,
    grids: Grids | None = None,
    unwritten: frozenset[str] = frozenset(),
) -> HfFamily:
    def settings(keys: HfKeys) -> HfKeys:
        whole = {**left_out, **keys}
        return {**read_common(whole, grids=grids), **read(whole)}

    return HfFamily(
        model_type=model_type,
        architecture=architecture,
        settings=settings,
        describe=partial(_describe, family=model_type, settings=settings, write=write, unwritten=unwritten),
        tensors=decoder_tensors,
        # Alone; in a composed model as transformers before 5 wrote it, and since.
        renamed=(
            {},
            {"": "language_model."},
            {"model.": "model.language_model."},
            {"model.": "model.text_model."},  # of Idefics 3 and SmolVLM
        ),
        # Qwen2-VL's tower lies beside what is named as if alone.
        dropout=DROPOUT,
        carried=HF_CARRIED,
        ignored=("*.rotary_emb.inv_freq", "visual.*"),
        copies=lambda config: {"lm_head.weight": "model.embed_tokens.weight"} if config.tied else {},
        export_note=_HEADLESS.format(architecture) if architecture.endswith("TextModel") else "",
    )


# What a key means that a folder leaves out, as sections of composed models do; by transformers' classes of configs.
_OF_LLAMA: HfKeys = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
}
_OF_MISTRAL: HfKeys = {
    **_OF_LLAMA,
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
_OF_QWEN2: HfKeys = {
    **_OF_LLAMA,
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_OF_QWEN3: HfKeys = {**_OF_QWEN2, "head_dim": 128}
_OF_QWEN3_MOE: HfKeys = {
    **_OF_QWEN2,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "router_aux_loss_coef": 1e-3,
}
_OF_QWEN2_VL: HfKeys = {
    **_OF_QWEN2,
    "vocab_size": 152_064,
    "hidden_size": 8192,
    "intermediate_size": 29_568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
}

_OF_QWEN3_VL: HfKeys = {
    **_OF_LLAMA,
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 128_000,
    "rope_theta": 500_000.0,
}
_TOGETHER = Grids(section=(16, 24, 24), interleaved=False)
_IN_TURN = Grids(section=(24, 20, 20), interleaved=True)

LLAMA = _family("llama", "LlamaForCausalLM", read_llama, write_llama, _OF_LLAMA)
MISTRAL = _family("mistral", "MistralForCausalLM", read_mistral, write_mistral, _OF_MISTRAL)
QWEN2 = _family("qwen2", "Qwen2ForCausalLM", read_qwen2, write_window, _OF_QWEN2)
QWEN3 = _family("qwen3", "Qwen3ForCausalLM", read_qwen3, write_qwen3, _OF_QWEN3)
QWEN3_MOE = attrs.evolve(
    _family("qwen3_moe", "Qwen3MoeForCausalLM", read_qwen3_moe, write_qwen3_moe, _OF_QWEN3_MOE),
    # PEFT takes whatever is called as a part of an expert for one.
    adaptable=lambda config: [entry for entry in decoder_tensors(config) if ".mlp." not in entry.ours],
)
QWEN2_VL = _family("qwen2_vl_text", "Qwen2VLTextModel", read_qwen2, write_qwen2_vl, _OF_QWEN2_VL, grids=_TOGETHER)
QWEN2_5_VL = _family(
    "qwen2_5_vl_text", "Qwen2_5_VLTextModel", read_qwen2, write_qwen2_vl, _OF_QWEN2_VL, grids=_TOGETHER
)
QWEN3_VL = _family(
    "qwen3_vl_text",
    "Qwen3VLTextModel",
    read_qwen3_vl,
    write_qwen3_vl,
    _OF_QWEN3_VL,
    grids=_IN_TURN,
    unwritten=frozenset({"deepstack"}),  # which the folder's tower says
)
# As they are published, their keys of text and of all stand together; their sections since transformers 5 are above.
QWEN2_VL_WHOLE = _family(
    "qwen2_vl", "Qwen2VLForConditionalGeneration", read_qwen2, write_nothing, _OF_QWEN2_VL, grids=_TOGETHER
)
QWEN2_5_VL_WHOLE = _family(
    "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", read_qwen2, write_nothing, _OF_QWEN2_VL, grids=_TOGETHER
)
DECODER_HF = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    QWEN2_VL,
    QWEN2_5_VL,
    QWEN3_VL,
    QWEN2_VL_WHOLE,
    QWEN2_5_VL_WHOLE,
)
