"""Families of models of the library: configs, classes, and small ones of them. Free of torch until one is built."""

from mimo_transformers.family.config import HfConfig, HfDecoderConfig, HfEncoderConfig
from mimo_transformers.family.dropout import check_dropout, dropout_keys, rates_in, refused_rates, without_refused
from mimo_transformers.family.headed import PLAIN_HEAD
from mimo_transformers.family.image_text import (
    ImageHalf,
    half_of,
    image_half,
    image_text_class,
    image_text_types,
    is_image_text,
    new_image_text,
)
from mimo_transformers.family.library import (
    ATTENTION,
    base_path_of,
    causal_class,
    causal_types,
    config_of,
    is_causal,
    is_text_of_grids,
    is_tower,
    new_network,
    new_tower,
    quiet,
    registered_types,
    tower_class,
    tower_types,
)
from mimo_transformers.family.small_keys import thin
from mimo_transformers.family.small_whole import shrink

__all__ = [
    "ATTENTION",
    "PLAIN_HEAD",
    "HfConfig",
    "HfDecoderConfig",
    "HfEncoderConfig",
    "ImageHalf",
    "base_path_of",
    "causal_class",
    "causal_types",
    "check_dropout",
    "config_of",
    "dropout_keys",
    "half_of",
    "image_half",
    "image_text_class",
    "image_text_types",
    "is_causal",
    "is_image_text",
    "is_text_of_grids",
    "is_tower",
    "new_image_text",
    "new_network",
    "new_tower",
    "quiet",
    "rates_in",
    "refused_rates",
    "registered_types",
    "shrink",
    "thin",
    "tower_class",
    "tower_types",
    "without_refused",
]
