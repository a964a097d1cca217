"""The built-in language model ``hybrid``: how it registers. Free of torch until it is built.

Where it needs only settings that a decoder has too, it does as the decoder does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from mimo.hooks import hookimpl
from mimo.model.decoder import DECODER, check_vocabulary
from mimo.model.hybrid.config import ATTENTION, MAMBA, HybridConfig
from mimo.model.hybrid.hf import HYBRID_HF
from mimo.model.spec import LanguageModelSpec, Stage, TensorSupport

if TYPE_CHECKING:
    from torch import nn

    from mimo.model.parallel import Split, TensorAxis
    from mimo.model.spec import OpCost
    from mimo.topology import Recompute


def _build(config: HybridConfig, stage: Stage) -> nn.Module:
    from mimo.model.hybrid.model import Hybrid

    check_vocabulary(config.vocabulary)
    return Hybrid(config, stage)


def _divisible(config: HybridConfig) -> Mapping[str, int]:
    counts = {"heads": (ATTENTION, config.heads), "mamba_heads": (MAMBA, config.mamba_heads)}
    return {name: count for name, (letter, count) in counts.items() if letter in config.pattern}


def _plan(module: nn.Module, axis: TensorAxis) -> Mapping[str, Split]:
    from mimo.model.hybrid.parallelize import split_hybrid

    return split_hybrid(module, axis)


def _flops(
    config: HybridConfig, stage: Stage, recompute: Recompute, lengths: Sequence[int], labels: int
) -> Mapping[str, OpCost]:
    from mimo.model.hybrid.flops import hybrid_cost

    return hybrid_cost(config, stage, recompute, lengths, labels)


def _cheap(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the decoder's, and of Mamba-2 layers all between their products but the messages of context ranks."""
    from mimo.model.hybrid.mamba import Mamba

    mambas = [part for part in module.modules() if isinstance(part, Mamba)]
    inner = [method for part in mambas for method in (part.mix, part.norm.forward)]
    return [*DECODER.recompute["selective"](module), *inner]


HYBRID = attrs.evolve(
    DECODER,
    name="hybrid",
    config=HybridConfig,
    build=_build,
    tensor=TensorSupport(divisible=_divisible, plan=_plan, splits_rows=True),
    recompute={**DECODER.recompute, "selective": _cheap},
    deepstack=lambda _config: 0,
    flops=_flops,
    hf=HYBRID_HF,
)


@hookimpl
def mimo_register_language_models() -> list[LanguageModelSpec]:
    """Register ``hybrid``."""
    return [HYBRID]
