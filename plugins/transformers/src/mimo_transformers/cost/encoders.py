"""What ``hf-encoder`` and ``hf-images`` take, each found once for a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch

from mimo.hooks import ConfigError
from mimo.model import OpCost
from mimo.model.runtime import create_on
from mimo_transformers.cost.tower import TowerCost
from mimo_transformers.family import HfEncoderConfig, quiet
from mimo_transformers.tower.trial import build_encoder
from mimo_transformers.whole.config import HfImagesConfig
from mimo_transformers.whole.encoder import SIZE, size_of
from mimo_transformers.whole.trial import build_images

ConfigT = TypeVar("ConfigT")
ModuleT = TypeVar("ModuleT")
_COLOURS = 3
_FOUND: dict[tuple[str, int], TowerCost] = {}


def encoder_cost(
    config: HfEncoderConfig, hidden: int, recompute: str, sizes: Sequence[tuple[int, ...]]
) -> Mapping[str, OpCost]:
    """Return what a forward of ``hf-encoder`` takes over images of these sizes; see `mimo.model.EncoderSpec.flops`."""

    def find() -> TowerCost:
        encoder, shape = _built(build_encoder, config, hidden), (1, config.side, config.side)
        rows = encoder.rows.count

        def run(sizes: Sequence[tuple[int, int]]) -> object:
            return encoder([{"pixels": _pixels(config.channels, *shape[1:])} for _ in sizes])

        return TowerCost(
            encoder, run=run, layers=_layers(encoder.layer_forwards), shape=lambda _size: shape, rows=lambda _size: rows
        )

    return _found(config, hidden, find).of(sizes, recompute)


def images_cost(
    config: HfImagesConfig, hidden: int, recompute: str, sizes: Sequence[tuple[int, ...]]
) -> Mapping[str, OpCost]:
    """Return the same of ``hf-images``."""

    def find() -> TowerCost:
        encoder, shape = _built(build_images, config, hidden), config.processing.shape

        def item(size: tuple[int, int]) -> dict[str, torch.Tensor]:
            count, *sides = shape(size)
            return {"pixels": _pixels(count, _COLOURS, *sides), SIZE: size_of(*size)}

        def run(sizes: Sequence[tuple[int, int]]) -> object:
            return encoder([item(size) for size in sizes])

        return TowerCost(
            encoder, run=run, layers=_layers(encoder.layer_forwards), shape=shape, rows=config.processing.rows
        )

    return _found(config, hidden, find).of(sizes, recompute)


def _found(config: Any, hidden: int, find: Callable[[], TowerCost]) -> TowerCost:
    key = (f"{type(config).__name__} {config!r}", hidden)
    if key not in _FOUND:
        with quiet():
            _FOUND.setdefault(key, find())  # of two threads the first is right for both
    return _FOUND[key]


def _built(build: Callable[[ConfigT, int], ModuleT], config: ConfigT, hidden: int) -> ModuleT:
    """Return an encoder without storage."""
    with create_on("meta"):
        return build(config, hidden)


def _layers(forwards: Callable[[], Sequence[Any]]) -> list[Any]:
    """Return the layers of a tower, none where it has no list of them."""
    with suppress(ConfigError):
        return [forward.__self__ for forward in forwards()]
    return []


def _pixels(*shape: int) -> torch.Tensor:
    """Return pixels, none of which is 0, as padding may be."""
    return torch.ones(*shape)
