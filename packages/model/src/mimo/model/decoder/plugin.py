"""The built-in language model ``decoder``: its settings, and how it registers. Free of torch until it is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mimo.hooks import ConfigError, hookimpl
from mimo.model.decoder.config import DecoderConfig
from mimo.model.decoder.hf import DECODER_HF
from mimo.model.decoder.parallelize import stage_context, stage_experts, stage_recompute, stage_tensor
from mimo.model.spec import (
    STAGE_PARTS,
    AuxLossNames,
    LanguageModelSpec,
    Stage,
    ends_share,
    load_name,
    stage_parts,
)

if TYPE_CHECKING:
    from torch import nn

    from mimo.model.spec import OpCost
    from mimo.topology import Recompute


def _build(config: DecoderConfig, stage: Stage) -> nn.Module:
    from mimo.model.decoder.model import Decoder

    check_vocabulary(config.vocabulary)
    return Decoder(config, stage)


def check_vocabulary(size: int) -> None:
    """Refuse to build a language model whose vocabulary is unknown.

    Raises:
        ConfigError: it is 0.
    """
    if size == 0:
        where = "modules.language.config.vocabulary"
        raise ConfigError(where, expected="a number of ids, or a tokenizer to take it from", got="0")


def _aux_losses(config: DecoderConfig) -> AuxLossNames:
    losses = {"balance": config.balance_loss, "z": config.z_loss, "next_tokens": config.next_tokens}
    return AuxLossNames(
        losses=tuple(name for name, coefficient in losses.items() if coefficient),
        counts={load_name(path): config.experts for path in config.expert_paths},
    )


def _flops(
    config: DecoderConfig, stage: Stage, recompute: Recompute, lengths: Sequence[int], labels: int
) -> Mapping[str, OpCost]:
    from mimo.model.decoder.flops import decoder_cost

    return decoder_cost(config, stage, recompute, lengths, labels)


DECODER = LanguageModelSpec(
    name="decoder",
    config=DecoderConfig,
    hidden=lambda config: config.hidden,
    layers=lambda config: config.layers,
    vocabulary=lambda config: config.vocabulary,
    build=_build,
    tied=ends_share,
    parts=STAGE_PARTS,
    stage_parts=stage_parts,
    tensor=stage_tensor(lambda config: {"heads": config.heads}),
    context=stage_context(),
    experts=stage_experts(lambda config: config.experts),
    aux_losses=_aux_losses,
    next_tokens=lambda config: config.next_tokens,
    deepstack=lambda config: config.deepstack,
    recompute=stage_recompute(),
    chunks_loss=True,
    distils=True,
    flops=_flops,
    hf=DECODER_HF,
    hf_record=Path(__file__).parents[1] / "parity.json",
)


@hookimpl
def mimo_register_language_models() -> list[LanguageModelSpec]:
    """Register ``decoder``."""
    return [DECODER]
