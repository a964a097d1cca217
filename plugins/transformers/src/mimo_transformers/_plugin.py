"""The language model ``hf-decoder``: how it registers. Free of torch and transformers until they are needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mimo.hooks import hookimpl
from mimo.model import STAGE_PARTS, LanguageModelSpec, Stage, ends_share, stage_context, stage_parts, stage_recompute
from mimo_transformers._config import HfDecoderConfig

if TYPE_CHECKING:
    from torch import nn


def _build(config: HfDecoderConfig, stage: Stage) -> nn.Module:
    from mimo_transformers._proof import check_config, prove
    from mimo_transformers._stage import HfStage

    check_config(config)
    prove(config)
    return HfStage(config, stage)


HF_DECODER = LanguageModelSpec(
    name="hf-decoder",
    config=HfDecoderConfig,
    hidden=lambda config: config.hidden,
    layers=lambda config: config.layers,
    vocabulary=lambda config: config.vocabulary,
    build=_build,
    tied=ends_share,
    parts={**STAGE_PARTS, "embedding": ("embedding", "before")},
    stage_parts=stage_parts,
    context=stage_context(),
    recompute={"full": stage_recompute()["full"]},
)


@hookimpl
def mimo_register_language_models() -> list[LanguageModelSpec]:
    """Register ``hf-decoder``."""
    return [HF_DECODER]
