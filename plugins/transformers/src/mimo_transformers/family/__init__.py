"""Families of models of the library: configs, classes, and small ones of them. Free of torch until one is built."""

from mimo_transformers.family.config import HfDecoderConfig
from mimo_transformers.family.library import ATTENTION, causal_class, config_of, is_causal, new_network, quiet
from mimo_transformers.family.small_keys import shrink, thin

__all__ = [
    "ATTENTION",
    "HfDecoderConfig",
    "causal_class",
    "config_of",
    "is_causal",
    "new_network",
    "quiet",
    "shrink",
    "thin",
]
