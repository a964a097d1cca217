"""The built-in language model ``decoder``: its settings, and how it registers. Free of torch until it is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mimo.hooks import ConfigError, hookimpl
from mimo.model._decoder_config import DecoderConfig
from mimo.model._decoder_hf import DECODER_HF
from mimo.model._specs import (
    ContextSupport,
    ExpertSupport,
    LanguageModelSpec,
    Stage,
    TensorSupport,
    Told,
    ends_share,
    has_embedding,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mimo.model._work import Work
    from mimo.model.runtime import ContextAxis, ExpertAxis, Split, TensorAxis
    from mimo.topology import Recompute


def _build(config: DecoderConfig, stage: Stage) -> nn.Module:
    from mimo.model._decoder import Decoder

    check_vocabulary(config.vocabulary)
    return Decoder(config, stage)


def check_vocabulary(size: int) -> None:
    """Refuse to build a language model whose vocabulary nobody has told.

    Raises:
        ConfigError: it is 0.
    """
    if size == 0:
        where = "modules.language.config.vocabulary"
        raise ConfigError(where, expected="a number of ids, or a tokenizer to take it from", got="0")


def _plan(module: nn.Module, axis: TensorAxis) -> Mapping[str, Split]:
    from mimo.model._tensor_plan import split_stage

    return split_stage(module, axis)


def _expert_plan(module: nn.Module, axis: ExpertAxis) -> Mapping[str, Split]:
    from mimo.model._expert_plan import split_experts

    return split_experts(module, axis)


def _after_step(module: nn.Module, counts: Mapping[str, Tensor]) -> None:
    from mimo.model._expert_plan import follow_loads

    follow_loads(module, counts)


def _tells(config: DecoderConfig) -> Told:
    losses = {"balance": config.balance_loss, "z": config.z_loss, "next_tokens": config.next_tokens}
    return Told(
        losses=tuple(name for name, coefficient in losses.items() if coefficient),
        counts={load_name(path): config.experts for path in config.expert_paths},
    )


def load_name(path: str) -> str:
    """Return under what name a `Ledger` counts the rows that chose each expert of the layer at a path."""
    return f"{path}.load"


def _flops(
    config: DecoderConfig, stage: Stage, recompute: Recompute, lengths: Sequence[int], labels: int
) -> Mapping[str, Work]:
    from mimo.model._decoder_work import decoder_work

    return decoder_work(config, stage, recompute, lengths, labels)


def _attach(module: nn.Module, context: ContextAxis) -> None:
    from mimo.model._language_stage import LanguageStage

    assert isinstance(module, LanguageStage)
    module.context = context


def _layers(module: nn.Module) -> list[Callable[..., Any]]:
    from mimo.model._language_stage import LanguageStage
    from mimo.model._next_token import NextToken

    assert isinstance(module, LanguageStage)
    heads = [head for head in module.next_tokens.values() if isinstance(head, NextToken)]
    further = [layer for head in heads for layer in head.layers.values()]
    return [layer.forward for layer in (*module.layers.values(), *further)]


def _cheap(module: nn.Module) -> list[Callable[..., Any]]:
    """Return what keeps much and is cheap to compute again (Korthikanti et al. 2022, arXiv:2205.05198, section 5).

    Attention between its products (as there), and likewise the feed-forward parts between theirs, those of experts
    too. No product is repeated; neither is routing, nor a message of experts.
    """
    from mimo.model._decoder import Attention
    from mimo.model._experts import Experts
    from mimo.model._mlp import Mlp

    return [part.finish for part in module.modules() if isinstance(part, Attention | Experts | Mlp)]


def _stage_parts(config: DecoderConfig, stage: Stage) -> frozenset[str]:
    parts = {"layers"}
    if has_embedding(config, stage):
        parts.add("embedding")
    if stage.is_last:
        parts.add("head")
    if stage.is_last and config.next_tokens:
        parts.add("next_tokens")
    return frozenset(parts)


DECODER = LanguageModelSpec(
    name="decoder",
    config=DecoderConfig,
    hidden=lambda config: config.hidden,
    layers=lambda config: config.layers,
    vocabulary=lambda config: config.vocabulary,
    build=_build,
    tied=ends_share,
    parts={
        "embedding": ("embedding",),
        "layers": ("layers",),
        "head": ("norm", "head"),
        "next_tokens": ("next_tokens",),
    },
    stage_parts=_stage_parts,
    tensor=TensorSupport(divisible=lambda config: {"heads": config.heads}, plan=_plan, splits_rows=True),
    context=ContextSupport(attach=_attach),
    experts=ExpertSupport(count=lambda config: config.experts, plan=_expert_plan, after_step=_after_step),
    tells=_tells,
    next_tokens=lambda config: config.next_tokens,
    recompute={"full": _layers, "selective": _cheap},
    flops=_flops,
    hf=DECODER_HF,
)


@hookimpl
def mimo_register_language_models() -> list[LanguageModelSpec]:
    """Register ``decoder``."""
    return [DECODER]
