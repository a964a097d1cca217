"""Keys of a ``config.json`` that have something dropped at random in training, and which of them are refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import attrs

from mimo.hooks import ConfigError
from mimo_transformers.family.config import HfConfig

HfConfigT = TypeVar("HfConfigT", bound=HfConfig)

_DROPOUT = re.compile(r"^(?!classifier|summary).*drop(out)?(_path|_connect)?(_prob|_rate)?$")
"""Keys that drop something, but for heads that no model here has."""
_LAYERS = "layerdrop"
_REFUSED = re.compile(f"attention|attn|{_LAYERS}")
"""Those of them that drop weights of attention, or whole layers of a step."""


def dropout_keys(keys: Iterable[str]) -> list[str]:
    """Return those of some keys that say at which rate something is dropped."""
    return [key for key in keys if _DROPOUT.search(key)]


def refused_rates(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return by key what has weights of attention or whole layers dropped, which never happens here."""
    return {key: values[key] for key in rates_in(values) if _REFUSED.search(key)}


def rates_in(values: Mapping[str, Any]) -> dict[str, float]:
    """Return by key the rates above 0 at which something is dropped, the largest where there is one for each depth."""
    found = {}
    for key in dropout_keys(values):
        rates = values[key] if isinstance(values[key], list | tuple) else [values[key]]
        found[key] = max((float(rate) for rate in rates if isinstance(rate, int | float)), default=0.0)
    return {key: rate for key, rate in found.items() if rate}


def without_refused(config: HfConfigT) -> HfConfigT:
    """Return a config with rates of 0 in the place of those that `check_dropout` refuses."""
    rates = refused_rates(config.library().to_dict())
    still = {key: [0.0] * len(rate) if isinstance(rate, list | tuple) else 0.0 for key, rate in rates.items()}
    return attrs.evolve(config, values={**config.values, **still}) if rates else config


def check_dropout(config: HfConfig, *, where: str) -> None:
    """Refuse a config by which weights of attention or whole layers would be dropped.

    Args:
        config: of a model.
        where: path of its keys.

    Raises:
        ConfigError: by the key.
    """
    for key, rate in refused_rates(config.library().to_dict()).items():
        what = "whole layers" if _LAYERS in key else "weights of attention"
        raise ConfigError(
            f"{where}.{key}",
            expected="0.0, as nothing of that kind is dropped here",
            got=f"{key} = {rate!r}, at which {config.model_type!r} drops {what}",
            fix=f"Set {key} = 0.0 there to train without.",
        )
