"""What encoder and language-model plugins are written against; free of torch. The model: `mimo.model.runtime`."""

from mimo.hooks import Kind
from mimo.model import hookspecs
from mimo.model.build import Frozen, check_module, check_training, is_frozen, named_by_parts, stage_trains
from mimo.model.decoder import DECODER, DecoderConfig
from mimo.model.encoder import packed_context, packed_recompute, packed_seam, packed_stages, packed_tensor
from mimo.model.hybrid import HYBRID, HybridConfig
from mimo.model.spec import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_LEARNED_ROWS,
    MAX_PATCH,
    MAX_PIXELS,
    MAX_ROWS,
    MAX_TILES,
    MAX_VOCABULARY,
    MAX_WIDTH,
    Activation,
    ContextSupport,
    EncoderSeam,
    EncoderSpec,
    EncoderStages,
    ExpertSupport,
    HfFamily,
    HfTensor,
    LanguageModelSpec,
    Lora,
    ProjectorConfig,
    Side,
    Stage,
    TensorSupport,
    Told,
    Work,
    attention_cost,
    best_tiling,
    encoder_layer_work,
    file_shapes,
    lora_linear,
    lora_names,
    place,
    product,
    projected_grid,
    projected_rows,
    projector_divisible,
    projector_work,
    without_absent,
)
from mimo.model.spec import divisor as hf_divisor
from mimo.model.spec import known as hf_known
from mimo.model.spec import no_dropout as hf_no_dropout
from mimo.model.spec import number as hf_number
from mimo.model.spec import only as hf_only
from mimo.model.spec import real as hf_real
from mimo.model.spec import refuse as hf_refused
from mimo.model.spec import small as hf_small

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
    "attention_cost",
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
