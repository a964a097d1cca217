"""The parts of which `decoder` and `hybrid`, and language models of other packages, are made."""

from mimo.model.language.attention import Attention
from mimo.model.language.batch import (
    NO_LABEL,
    AuxLosses,
    LanguageBatch,
    LanguageModule,
    MtpLabels,
    SupportsDistillation,
)
from mimo.model.language.cache import DecodeCache, LayerCache, SequenceCache, SupportsDecodeCache
from mimo.model.language.deepstack import DeepRows
from mimo.model.language.expert_plan import follow_loads, split_experts
from mimo.model.language.mlp import Mlp
from mimo.model.language.moe import Experts, Moe
from mimo.model.language.mtp import MtpModule
from mimo.model.language.rotary import Rotation
from mimo.model.language.routing import Routing, add_router_losses
from mimo.model.language.stage import LanguageStage
from mimo.model.language.tensor_plan import ROWS, column, row, split_stage

__all__ = [
    "NO_LABEL",
    "ROWS",
    "Attention",
    "AuxLosses",
    "DecodeCache",
    "DeepRows",
    "Experts",
    "LanguageBatch",
    "LanguageModule",
    "LanguageStage",
    "LayerCache",
    "Mlp",
    "Moe",
    "MtpLabels",
    "MtpModule",
    "Rotation",
    "Routing",
    "SequenceCache",
    "SupportsDecodeCache",
    "SupportsDistillation",
    "add_router_losses",
    "column",
    "follow_loads",
    "row",
    "split_experts",
    "split_stage",
]
