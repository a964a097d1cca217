"""Small models of families, made by the rule that trials use."""

from typing import Any

import pytest
import transformers

from mimo_transformers import HfDecoderConfig, shrink
from mimo_transformers.family import config_of


def known(model_type: str) -> str:
    """Return a model type; a test of one that the installed library lacks is skipped."""
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    return model_type


def small(model_type: str, **changes: Any) -> HfDecoderConfig:
    """Return the config of a small model of a family."""
    values = shrink(config_of(known(model_type), {}), **changes)
    return HfDecoderConfig(model_type=model_type, vocabulary=values.pop("vocab_size"), values=values)


def is_older(version: str) -> bool:
    """Return whether the installed library is older than a version of two numbers."""
    installed, wanted = (tuple(map(int, one.split(".")[:2])) for one in (transformers.__version__, version))
    return installed < wanted
