"""What dataset and tokenizer plugins are written against, the tokens of a sample, and the samples of a step."""

from mimo.data.samples.layout import NO_LABEL, PlacedItem, SampleLayout, lay_out
from mimo.data.samples.packing import Packed, pack
from mimo.data.samples.sampler import StepSampler
from mimo.data.samples.specs import (
    Dataset,
    DatasetSpec,
    SplitName,
    SupportsEnds,
    SupportsWeights,
    Tokenizer,
    TokenizerSpec,
    ends_of,
    weights_of,
)
from mimo.data.samples.weights import MAX_WEIGHT, TargetWeights

__all__ = [
    "MAX_WEIGHT",
    "NO_LABEL",
    "Dataset",
    "DatasetSpec",
    "Packed",
    "PlacedItem",
    "SampleLayout",
    "SplitName",
    "StepSampler",
    "SupportsEnds",
    "SupportsWeights",
    "TargetWeights",
    "Tokenizer",
    "TokenizerSpec",
    "ends_of",
    "lay_out",
    "pack",
    "weights_of",
]
