"""The language model `decoder`. What is named here is free of torch; `model` needs it."""

from mimo.model.decoder.config import DecoderConfig
from mimo.model.decoder.plugin import DECODER, check_vocabulary

__all__ = [
    "DECODER",
    "DecoderConfig",
    "check_vocabulary",
]
