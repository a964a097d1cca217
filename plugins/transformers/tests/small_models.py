"""Small models of families, made by the rule that trials use."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

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


def as_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what the library writes, with tensors that it joins and cuts evenly cut as they are published.

    A convolution over queries, keys or values has as many rows as what makes these; an embedding as the head.
    """
    found = dict(tensors)
    for name in tensors:
        if name.endswith("q_conv1d.weight"):
            parts = [name.replace("q_conv1d", f"{one}_conv1d") for one in "qkv"]
            _cut(found, parts, rows=[len(found[part.replace("conv1d", "proj")]) for part in parts])
        if name.endswith("wte.embedding"):
            parts, rows = [name, name.replace("embedding", "new_embedding")], len(found["lm_head.weight"])
            _cut(found, parts, rows=[rows, sum(len(found[part]) for part in parts) - rows])
    return found


def _cut(tensors: dict[str, Tensor], parts: list[str], *, rows: list[int]) -> None:
    joined = torch.cat([tensors[part] for part in parts])
    tensors |= {part: one.clone() for part, one in zip(parts, joined.split(rows), strict=True)}
