"""The published families that ``hybrid`` can read and write: Nemotron-H, with or without experts, and Mamba-2.

Their config.json name things differently; a setting that its keys can't express is found by reading back what was
written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from mimo.hooks import ConfigError
from mimo.model.hybrid.config import ATTENTION, EXPERTS, MLP, HybridConfig
from mimo.model.hybrid.hf_keys import WRITTEN_KINDS, read_mamba, read_nemotron, write_mamba, write_nemotron
from mimo.model.hybrid.hf_tensors import adaptable_linears, hybrid_tensors, nemotron_tensors
from mimo.model.spec import HF_CARRIED, HfFamily, HfKeys

_UNWRITTEN = frozenset(
    {"expert_bias_rate", "balance_loss", "z_loss", "next_tokens", "next_tokens_loss", "next_tokens_pattern"}
)
"""Said where a model is trained, not in what it is."""


def _describe(
    config: HybridConfig,
    *,
    family: str,
    read: Callable[[HfKeys], Mapping[str, Any]],
    write: Callable[[HybridConfig], HfKeys],
) -> HfKeys:
    """Return what a folder says of ``config``, having made sure that it says all of it."""
    written = write(config)
    unwritten = {name: getattr(config, name) for name in _UNWRITTEN}
    back = _resolved(HybridConfig(**{**read(written), **unwritten}))
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


def _describe_further(config: HybridConfig) -> HfKeys:
    """Return what a folder says of MTP modules: `transformers` has names of layers, others letters."""
    return {
        "num_nextn_predict_layers": config.next_tokens,
        "mtp_layers_block_type": [WRITTEN_KINDS[letter] for letter in config.next_pattern],
        "mtp_hybrid_override_pattern": config.next_pattern,
    }


def _family(
    model_type: str,
    architecture: str,
    read: Callable[[HfKeys], Mapping[str, Any]],
    write: Callable[[HybridConfig], HfKeys],
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
        carried=HF_CARRIED,
        copies=lambda config: {"lm_head.weight": "backbone.embeddings.weight"} if config.tied else {},
        **more,
    )


NEMOTRON_H = _family(
    "nemotron_h",
    "NemotronHForCausalLM",
    read_nemotron,
    write_nemotron,
    ({}, {"backbone.": "model."}, {"": "language_model."}),
    tensors=nemotron_tensors,
    adaptable=partial(adaptable_linears, root="model"),
    # `NemotronHConfig` has the first, which nothing in the library's `modeling_nemotron_h.py` (5.23.0) reads.
    dropout=("hidden_dropout", "attention_dropout"),
    beside=_describe_further,
)
MAMBA2 = _family(
    "mamba2",
    "Mamba2ForCausalLM",
    read_mamba,
    write_mamba,
    ({}, {"backbone.embeddings.": "backbone.embedding."}),
    tensors=hybrid_tensors,
    adaptable=partial(adaptable_linears, root="backbone"),
)
HYBRID_HF = (NEMOTRON_H, MAMBA2)
