"""Samples and their token layout, packing, sampling, and what dataset and tokenizer plugins are written against."""

from mimo.data import hookspecs
from mimo.data.placement import (
    EncoderLoads,
    Loads,
    PlacedMicrobatch,
    in_whole_numbers,
    lane_costs,
    lane_rows,
    place_by_cost,
    place_by_count,
    step_cost,
)
from mimo.data.samples import (
    NO_LABEL,
    Dataset,
    DatasetSpec,
    Packed,
    PlacedItem,
    SampleLayout,
    SplitName,
    StepSampler,
    SupportsEnds,
    SupportsWeights,
    Tokenizer,
    TokenizerSpec,
    ends_of,
    lay_out,
    pack,
    weights_of,
)
from mimo.data.sources import image_size, load_image, open_image
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
    "NO_LABEL",
    "TOKENIZERS",
    "Chat",
    "ChatError",
    "ChatSettings",
    "ChatTokenizer",
    "ChatTokens",
    "Conversation",
    "Dataset",
    "DatasetSpec",
    "EncoderLoads",
    "LimitedTokenizer",
    "Loads",
    "Packed",
    "PlacedItem",
    "PlacedMicrobatch",
    "Reference",
    "SampleLayout",
    "SplitName",
    "StepSampler",
    "SupportsEnds",
    "SupportsWeights",
    "Tokenizer",
    "TokenizerSpec",
    "ends_of",
    "image_size",
    "in_whole_numbers",
    "lane_costs",
    "lane_rows",
    "lay_out",
    "load_image",
    "named_template",
    "named_templates",
    "open_image",
    "pack",
    "parse_conversation",
    "place_by_cost",
    "place_by_count",
    "step_cost",
    "weights_of",
]
