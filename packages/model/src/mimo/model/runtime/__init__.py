"""The torch side of the model: layers to write plugins with, `build_part` that makes a rank's share, `MimoModel`."""

from mimo.model.runtime._attention import attend
from mimo.model.runtime._axis import TensorAxis
from mimo.model.runtime._build import build_part
from mimo.model.runtime._context import ContextAxis
from mimo.model.runtime._convolution import convolve, convolve_continued
from mimo.model.runtime._deferral import Deferral, Deferring, WeightsLater
from mimo.model.runtime._dispatch import Dispatch
from mimo.model.runtime._encoder_layers import (
    EncoderAttention,
    EncoderLayer,
    EncoderMlp,
    PackedEncoder,
    activate,
    split_encoder,
)
from mimo.model.runtime._expert_axis import ExpertAxis
from mimo.model.runtime._grouped import GroupedLinear
from mimo.model.runtime._hf import left_over, read_hf, write_hf
from mimo.model.runtime._language import NO_LABEL, LanguageBatch, LanguageModule, Ledger, NextLabels
from mimo.model.runtime._layers import Embedding, LayerNorm, Linear, RMSNorm
from mimo.model.runtime._lora import attach_lora, linears
from mimo.model.runtime._low_rank import LowRank
from mimo.model.runtime._memory import LayerMemory, Memory, Remembering
from mimo.model.runtime._multiply import multiply
from mimo.model.runtime._packed_rows import PackedRows, touched_by
from mimo.model.runtime._parameters import Split, local
from mimo.model.runtime._part import MimoModel, Part
from mimo.model.runtime._patches import packed_patches
from mimo.model.runtime._projectors import Projector
from mimo.model.runtime._router import Choices, Router
from mimo.model.runtime._rowwise import turn
from mimo.model.runtime._scan import SampleChunks, ScanInputs, scan, scan_by_chunks, scan_by_row, scan_on
from mimo.model.runtime._segments import Segments
from mimo.model.runtime._sequences import Sequences
from mimo.model.runtime._trained import build_stage, stage_without_storage, trained_paths
from mimo.model.runtime._vocabulary import vocabulary_argmax, vocabulary_cross_entropy

__all__ = [
    "NO_LABEL",
    "Choices",
    "ContextAxis",
    "Deferral",
    "Deferring",
    "Dispatch",
    "Embedding",
    "EncoderAttention",
    "EncoderLayer",
    "EncoderMlp",
    "ExpertAxis",
    "GroupedLinear",
    "LanguageBatch",
    "LanguageModule",
    "LayerMemory",
    "LayerNorm",
    "Ledger",
    "Linear",
    "LowRank",
    "Memory",
    "MimoModel",
    "NextLabels",
    "PackedEncoder",
    "PackedRows",
    "Part",
    "Projector",
    "RMSNorm",
    "Remembering",
    "Router",
    "SampleChunks",
    "ScanInputs",
    "Segments",
    "Sequences",
    "Split",
    "TensorAxis",
    "WeightsLater",
    "activate",
    "attach_lora",
    "attend",
    "build_part",
    "build_stage",
    "convolve",
    "convolve_continued",
    "left_over",
    "linears",
    "local",
    "multiply",
    "packed_patches",
    "read_hf",
    "scan",
    "scan_by_chunks",
    "scan_by_row",
    "scan_on",
    "split_encoder",
    "stage_without_storage",
    "touched_by",
    "trained_paths",
    "turn",
    "vocabulary_argmax",
    "vocabulary_cross_entropy",
    "write_hf",
]
