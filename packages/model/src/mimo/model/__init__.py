"""What encoder and language-model plugins are written against; free of torch. The model: `mimo.model.runtime`."""

from mimo.hooks import Kind
from mimo.model import hookspecs
from mimo.model._checks import Frozen, check_module, check_training, is_frozen, named_by_parts, stage_trains
from mimo.model._decoder_config import DecoderConfig
from mimo.model._decoder_spec import DECODER
from mimo.model._encoder_work import Activation, encoder_layer_work
from mimo.model._hf import HfFamily, HfTensor, file_shapes, place, without_absent
from mimo.model._hf_keys import known as hf_known
from mimo.model._hf_keys import only as hf_only
from mimo.model._hf_keys import refuse as hf_refused
from mimo.model._hybrid_config import HybridConfig
from mimo.model._hybrid_spec import HYBRID
from mimo.model._lora import Lora, lora_linear, lora_names
from mimo.model._packed_encoder import packed_context, packed_recompute, packed_stages, packed_tensor
from mimo.model._projector import (
    ProjectorConfig,
    projected_grid,
    projected_rows,
    projector_divisible,
    projector_work,
)
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
from mimo.model._tiling import best_tiling
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
    "HYBRID",
    "LANGUAGE_MODELS",
    "Activation",
    "ContextSupport",
    "DecoderConfig",
    "EncoderSpec",
    "EncoderStages",
    "ExpertSupport",
    "Frozen",
    "HfFamily",
    "HfTensor",
    "HybridConfig",
    "LanguageModelSpec",
    "Lora",
    "ProjectorConfig",
    "Stage",
    "TensorSupport",
    "Told",
    "Work",
    "attention",
    "best_tiling",
    "check_module",
    "check_training",
    "encoder_layer_work",
    "file_shapes",
    "hf_known",
    "hf_only",
    "hf_refused",
    "is_frozen",
    "lora_linear",
    "lora_names",
    "named_by_parts",
    "packed_context",
    "packed_recompute",
    "packed_stages",
    "packed_tensor",
    "place",
    "product",
    "projected_grid",
    "projected_rows",
    "projector_divisible",
    "projector_work",
    "stage_trains",
    "without_absent",
]
