"""Samples and their token layout, packing, their order, and what dataset and tokenizer plugins are written against."""

from mimo.data import hookspecs
from mimo.data.order import FIRST_ORDER, NEWEST_ORDER, SampleOrder, WeightChange, weights_of_parts
from mimo.data.samples import (
    NO_LABEL,
    DataPart,
    Dataset,
    DatasetSources,
    DatasetSpec,
    Packed,
    PlacedItem,
    SampleLayout,
    SourceTable,
    SplitName,
    SupportsEnds,
    SupportsParts,
    SupportsWeights,
    Tokenizer,
    TokenizerSpec,
    ends_of,
    lay_out,
    pack,
    parts_of,
    weights_of,
)
from mimo.data.sources import image_size, load_image, open_image, settings_under
from mimo.data.text import (
    Chat,
    ChatError,
    ChatSettings,
    ChatTokenizer,
    ChatTokens,
    Conversation,
    LimitedTokenizer,
    Reference,
    named_template,
    named_templates,
    parse_conversation,
)
from mimo.hooks import Kind

DATASETS = Kind(
    group="mimo.datasets", noun="dataset", hook="mimo_register_datasets", hookspecs=hookspecs, spec=DatasetSpec
)
TOKENIZERS = Kind(
    group="mimo.tokenizers",
    noun="tokenizer",
    hook="mimo_register_tokenizers",
    hookspecs=hookspecs,
    spec=TokenizerSpec,
)

__all__ = [
    "DATASETS",
    "FIRST_ORDER",
    "NEWEST_ORDER",
    "NO_LABEL",
    "TOKENIZERS",
    "Chat",
    "ChatError",
    "ChatSettings",
    "ChatTokenizer",
    "ChatTokens",
    "Conversation",
    "DataPart",
    "Dataset",
    "DatasetSources",
    "DatasetSpec",
    "LimitedTokenizer",
    "Packed",
    "PlacedItem",
    "Reference",
    "SampleLayout",
    "SampleOrder",
    "SourceTable",
    "SplitName",
    "SupportsEnds",
    "SupportsParts",
    "SupportsWeights",
    "Tokenizer",
    "TokenizerSpec",
    "WeightChange",
    "ends_of",
    "image_size",
    "lay_out",
    "load_image",
    "named_template",
    "named_templates",
    "open_image",
    "pack",
    "parse_conversation",
    "parts_of",
    "settings_under",
    "weights_of",
    "weights_of_parts",
]
