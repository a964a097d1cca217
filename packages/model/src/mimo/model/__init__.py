"""What encoder and language-model plugins are written against; free of torch. The model: `mimo.model.runtime`."""

from mimo.hooks import Kind
from mimo.model import hookspecs
from mimo.model._checks import Frozen, check_module, check_training, is_frozen, named_by_parts, stage_trains
from mimo.model._decoder_config import DecoderConfig
from mimo.model._decoder_spec import DECODER
from mimo.model._encoder_work import Activation, encoder_layer_work
from mimo.model._hf import HfFamily, HfTensor, file_shapes, place, without_absent
from mimo.model._hf_keys import divisor as hf_divisor
from mimo.model._hf_keys import known as hf_known
from mimo.model._hf_keys import no_dropout as hf_no_dropout
from mimo.model._hf_keys import number as hf_number
from mimo.model._hf_keys import only as hf_only
from mimo.model._hf_keys import real as hf_real
from mimo.model._hf_keys import refuse as hf_refused
from mimo.model._hf_keys import small as hf_small
from mimo.model._hybrid_config import HybridConfig
from mimo.model._hybrid_spec import HYBRID
from mimo.model._lora import Lora, lora_linear, lora_names
from mimo.model._packed_encoder import packed_context, packed_recompute, packed_seam, packed_stages, packed_tensor
from mimo.model._projector import (
    ProjectorConfig,
    projected_grid,
    projected_rows,
    projector_divisible,
    projector_work,
)
from mimo.model._sizes import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_LEARNED_ROWS,
    MAX_PATCH,
    MAX_PIXELS,
    MAX_ROWS,
    MAX_TILES,
    MAX_VOCABULARY,
    MAX_WIDTH,
)
from mimo.model._specs import (
    ContextSupport,
    EncoderSeam,
    EncoderSpec,
    EncoderStages,
    ExpertSupport,
    LanguageModelSpec,
    Side,
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
    "MAX_HEADS",
    "MAX_LAYERS",
    "MAX_LEARNED_ROWS",
    "MAX_PATCH",
    "MAX_PIXELS",
    "MAX_ROWS",
    "MAX_TILES",
    "MAX_VOCABULARY",
    "MAX_WIDTH",
    "Activation",
    "ContextSupport",
    "DecoderConfig",
    "EncoderSeam",
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
    "Side",
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
    "hf_divisor",
    "hf_known",
    "hf_no_dropout",
    "hf_number",
    "hf_only",
    "hf_real",
    "hf_refused",
    "hf_small",
    "is_frozen",
    "lora_linear",
    "lora_names",
    "named_by_parts",
    "packed_context",
    "packed_recompute",
    "packed_seam",
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
