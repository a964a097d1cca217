"""Families of models of the library: configs, classes, and small ones of them. Free of torch until one is built."""

from mimo_transformers.family.config import HfConfig, HfDecoderConfig, HfEncoderConfig
from mimo_transformers.family.library import (
    ATTENTION,
    causal_class,
    config_of,
    is_causal,
    is_tower,
    new_network,
    new_tower,
    quiet,
    tower_class,
)
from mimo_transformers.family.small_keys import shrink, thin

__all__ = [
    "ATTENTION",
    "HfConfig",
    "HfDecoderConfig",
    "HfEncoderConfig",
    "causal_class",
    "config_of",
    "is_causal",
    "is_tower",
    "new_network",
    "new_tower",
    "quiet",
    "shrink",
    "thin",
    "tower_class",
]
