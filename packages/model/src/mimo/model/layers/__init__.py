"""Layers that know of tensor ranks, deferred weight gradients and LoRA."""

from mimo.model.layers.chunked_scan import (
    SampleChunks,
    ScanInputs,
    scan,
    scan_by_chunks,
    scan_by_row,
    scan_on,
    scan_single,
)
from mimo.model.layers.convolution import convolve, convolve_continued
from mimo.model.layers.deferred_weights import DeferredWeightGrads, DefersWeightGrads, WeightGradQueue
from mimo.model.layers.grouped_linear import GroupedLinear
from mimo.model.layers.linear import Embedding, Linear
from mimo.model.layers.low_rank import LowRank
from mimo.model.layers.norms import LayerNorm, RMSNorm, rms_norm
from mimo.model.layers.products import multiply
from mimo.model.layers.router import Choices, Router

__all__ = [
    "Choices",
    "DeferredWeightGrads",
    "DefersWeightGrads",
    "Embedding",
    "GroupedLinear",
    "LayerNorm",
    "Linear",
    "LowRank",
    "RMSNorm",
    "Router",
    "SampleChunks",
    "ScanInputs",
    "WeightGradQueue",
    "convolve",
    "convolve_continued",
    "multiply",
    "rms_norm",
    "scan",
    "scan_by_chunks",
    "scan_by_row",
    "scan_on",
    "scan_single",
]
