"""Small models of families, made by the rule that trials use."""

from typing import Any

from mimo_transformers import HfDecoderConfig, shrink
from mimo_transformers.family import config_of


def small(model_type: str, **changes: Any) -> HfDecoderConfig:
    """Return the config of a small model of a family."""
    values = shrink(config_of(model_type, {}), **changes)
    return HfDecoderConfig(model_type=model_type, vocabulary=values.pop("vocab_size"), values=values)
