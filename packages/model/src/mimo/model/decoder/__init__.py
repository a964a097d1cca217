"""The language model `decoder`. What is named here is free of torch; `model` needs it."""

from mimo.model.decoder.config import DecoderConfig
from mimo.model.decoder.parallelize import stage_context, stage_experts, stage_recompute, stage_tensor
from mimo.model.decoder.plugin import DECODER, check_vocabulary

__all__ = [
    "DECODER",
    "DecoderConfig",
    "check_vocabulary",
    "stage_context",
    "stage_experts",
    "stage_recompute",
    "stage_tensor",
]
