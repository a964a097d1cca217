"""What encoder and language-model plugins are written against; free of torch. The model: `mimo.model.runtime`."""

from mimo.hooks import Kind
from mimo.model import hookspecs
from mimo.model._checks import Frozen, check_module, is_frozen, stage_trains
from mimo.model._decoder_spec import DECODER, DecoderConfig
from mimo.model._specs import (
    ContextSupport,
    EncoderSpec,
    EncoderStages,
    ExpertSupport,
    LanguageModelSpec,
    Stage,
    TensorSupport,
    Told,
)
from mimo.model._work import Work, attention, product

ENCODERS = Kind(
    group="mimo.encoders", noun="encoder", hook="mimo_register_encoders", hookspecs=hookspecs, spec=EncoderSpec
)
LANGUAGE_MODELS = Kind(
    group="mimo.language_models",
    noun="language model",
    hook="mimo_register_language_models",
    hookspecs=hookspecs,
    spec=LanguageModelSpec,
)

__all__ = [
    "DECODER",
    "ENCODERS",
    "LANGUAGE_MODELS",
    "ContextSupport",
    "DecoderConfig",
    "EncoderSpec",
    "EncoderStages",
    "ExpertSupport",
    "Frozen",
    "LanguageModelSpec",
    "Stage",
    "TensorSupport",
    "Told",
    "Work",
    "attention",
    "check_module",
    "is_frozen",
    "product",
    "stage_trains",
]
