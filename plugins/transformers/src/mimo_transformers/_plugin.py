"""The language model ``hf-decoder``: how it registers. Free of torch and transformers until they are needed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import attrs

from mimo.hooks import hookimpl
from mimo.model import (
    STAGE_PARTS,
    AuxLossNames,
    ExpertSupport,
    LanguageModelSpec,
    OpCost,
    Stage,
    TensorSupport,
    ends_share,
    stage_context,
    stage_parts,
    stage_recompute,
)
from mimo_transformers.family import HfDecoderConfig
from mimo_transformers.weights import CAUSAL, RECORD

if TYPE_CHECKING:
    from torch import nn

    from mimo.model.runtime import ExpertAxis, Split, TensorAxis


def _check(config: HfDecoderConfig) -> None:
    from mimo_transformers.trial.packed import check_config, prove

    check_config(config)
    prove(config)


@cache
def _check_once(described: str) -> None:
    """Refuse what was described, which costs are computed of for many samples."""
    _check(HfDecoderConfig(**json.loads(described)))


def _build(config: HfDecoderConfig, stage: Stage) -> nn.Module:
    from mimo_transformers.model.stage import HfStage

    _check(config)
    return HfStage(config, stage)


def _divisible(config: HfDecoderConfig) -> Mapping[str, int]:
    from mimo_transformers.trial.packed import prove
    from mimo_transformers.trial.tensor import has_few_keys, plan_of

    prove(config)
    plan_of(config, shared=has_few_keys(config))
    return config.heads


def _check_context(config: HfDecoderConfig) -> None:
    from mimo_transformers.trial.packed import check_context

    check_context(config)


def _split(module: nn.Module, axis: TensorAxis) -> Mapping[str, Split]:
    from mimo_transformers.model.stage import HfStage
    from mimo_transformers.trial.tensor import tensor_splits

    assert isinstance(module, HfStage)
    return tensor_splits(module, axis)


def _split_experts(module: nn.Module, axis: ExpertAxis) -> Mapping[str, Split]:
    from mimo_transformers.model.stage import HfStage
    from mimo_transformers.trial.tensor import expert_splits

    assert isinstance(module, HfStage)
    return expert_splits(module, axis)


def _aux_losses(config: HfDecoderConfig) -> AuxLossNames:
    if config.balance_loss is None:
        return AuxLossNames()
    from mimo_transformers.model.routers import router_loss_names

    return router_loss_names(config)


def _flops(
    config: HfDecoderConfig, stage: Stage, recompute: str, lengths: Sequence[int], labels: int
) -> Mapping[str, OpCost]:
    from mimo_transformers.cost.decoder import decoder_cost

    _check_once(json.dumps(attrs.asdict(config), sort_keys=True))
    return decoder_cost(config, stage, recompute, lengths, labels)


HF_DECODER = LanguageModelSpec(
    name="hf-decoder",
    config=HfDecoderConfig,
    hidden=lambda config: config.hidden,
    layers=lambda config: config.layers,
    vocabulary=lambda config: config.vocabulary,
    build=_build,
    tied=ends_share,
    parts={**STAGE_PARTS, "embedding": ("embedding", "before", "drops")},
    stage_parts=stage_parts,
    tensor=TensorSupport(divisible=_divisible, plan=_split),
    context=attrs.evolve(stage_context(), check=_check_context),
    experts=ExpertSupport(count=lambda config: config.experts, plan=_split_experts),
    aux_losses=_aux_losses,
    deepstack=lambda config: config.deepstack,
    reads_items=lambda config: config.bidirectional_items,
    flops=_flops,
    hf_any=CAUSAL,
    hf_record=RECORD,
    recompute={"full": stage_recompute()["full"]},
    chunks_loss=True,
    distils=True,
)


@hookimpl
def mimo_register_language_models() -> list[LanguageModelSpec]:
    """Register ``hf-decoder``."""
    return [HF_DECODER]
