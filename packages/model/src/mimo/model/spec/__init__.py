"""What a plugin hands in, and how its cost is counted: specs, stages, LoRA, FLOPs, projectors, Hugging Face tables.

Free of torch.
"""

from mimo.model.spec.encoder_flops import Activation, encoder_layer_work
from mimo.model.spec.flops import Work, attention_cost, product
from mimo.model.spec.hf import HfFamily, HfTensor, file_shapes, place, without_absent
from mimo.model.spec.hf_keys import divisor, flag, known, no_dropout, number, only, real, refuse, small
from mimo.model.spec.language_config import (
    AXES,
    AttentionConfig,
    MlpConfig,
    MoeConfig,
    RotaryConfig,
    StageConfig,
    ends_share,
    has_embedding,
    load_name,
)
from mimo.model.spec.limits import (
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
from mimo.model.spec.lora import Lora, lora_linear, lora_names
from mimo.model.spec.projector import (
    RESAMPLER_RATIO,
    Grid,
    ProjectorConfig,
    projected_grid,
    projected_rows,
    projector_divisible,
    projector_work,
)
from mimo.model.spec.specs import (
    ContextSupport,
    EncoderSeam,
    EncoderSpec,
    EncoderStages,
    ExpertSupport,
    LanguageModelSpec,
    Methods,
    Side,
    TensorSupport,
    Told,
)
from mimo.model.spec.stage import Stage
from mimo.model.spec.tiling import best_tiling

__all__ = [
    "AXES",
    "MAX_HEADS",
    "MAX_LAYERS",
    "MAX_LEARNED_ROWS",
    "MAX_PATCH",
    "MAX_PIXELS",
    "MAX_ROWS",
    "MAX_TILES",
    "MAX_VOCABULARY",
    "MAX_WIDTH",
    "RESAMPLER_RATIO",
    "Activation",
    "AttentionConfig",
    "ContextSupport",
    "EncoderSeam",
    "EncoderSpec",
    "EncoderStages",
    "ExpertSupport",
    "Grid",
    "HfFamily",
    "HfTensor",
    "LanguageModelSpec",
    "Lora",
    "Methods",
    "MlpConfig",
    "MoeConfig",
    "ProjectorConfig",
    "RotaryConfig",
    "Side",
    "Stage",
    "StageConfig",
    "TensorSupport",
    "Told",
    "Work",
    "attention_cost",
    "best_tiling",
    "divisor",
    "encoder_layer_work",
    "ends_share",
    "file_shapes",
    "flag",
    "has_embedding",
    "known",
    "load_name",
    "lora_linear",
    "lora_names",
    "no_dropout",
    "number",
    "only",
    "place",
    "product",
    "projected_grid",
    "projected_rows",
    "projector_divisible",
    "projector_work",
    "real",
    "refuse",
    "small",
    "without_absent",
]
