"""What dataset and tokenizer plugins are written against, and the tokens of a sample."""

from mimo.data.samples.layout import NO_LABEL, PlacedItem, SampleLayout
from mimo.data.samples.layout_rules import LayoutRules, MadeItem, lay_out
from mimo.data.samples.packing import Packed, pack
from mimo.data.samples.specs import (
    AnswerMetricSpec,
    DataPart,
    Dataset,
    DatasetSources,
    DatasetSpec,
    SourceTable,
    SplitName,
    SupportsEnds,
    SupportsParts,
    SupportsWeights,
    Tokenizer,
    TokenizerSpec,
    ends_of,
    parts_of,
    weights_of,
)
from mimo.data.samples.weights import MAX_WEIGHT, TargetWeights

__all__ = [
    "MAX_WEIGHT",
    "NO_LABEL",
    "AnswerMetricSpec",
    "DataPart",
    "Dataset",
    "DatasetSources",
    "DatasetSpec",
    "LayoutRules",
    "MadeItem",
    "Packed",
    "PlacedItem",
    "SampleLayout",
    "SourceTable",
    "SplitName",
    "SupportsEnds",
    "SupportsParts",
    "SupportsWeights",
    "TargetWeights",
    "Tokenizer",
    "TokenizerSpec",
    "ends_of",
    "lay_out",
    "pack",
    "parts_of",
    "weights_of",
]
