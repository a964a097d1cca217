"""What ``hf-encoder`` and ``hf-images`` take, each found once for a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from mimo.model import OpCost
from mimo.model.runtime import create_on
from mimo_transformers.cost.tower import TowerCost
from mimo_transformers.family import HfEncoderConfig, quiet
from mimo_transformers.tower.trial import build_encoder
from mimo_transformers.whole.config import HfImagesConfig
from mimo_transformers.whole.encoder import SIZE
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

        def run(_size: tuple[int, int]) -> object:
            return encoder([{"pixels": _pixels(config.channels, *shape[1:])}])

        layers = _modules(encoder.layer_forwards) if recompute == "full" else []
        return TowerCost(encoder, run=run, layers=layers, shape=lambda _size: shape, rows=lambda _size: rows)

    return _found(config, hidden, recompute, find).of(sizes, recompute)


def images_cost(
    config: HfImagesConfig, hidden: int, recompute: str, sizes: Sequence[tuple[int, ...]]
) -> Mapping[str, OpCost]:
    """Return the same of ``hf-images``."""

    def find() -> TowerCost:
        encoder, shape = _built(build_images, config, hidden), config.processing.shape

        def run(size: tuple[int, int]) -> object:
            count, *sides = shape(size)
            return encoder([{"pixels": _pixels(count, _COLOURS, *sides), SIZE: torch.tensor(size)}])

        layers = _modules(encoder.layer_forwards) if recompute == "full" else []
        return TowerCost(encoder, run=run, layers=layers, shape=shape, rows=config.processing.rows)

    return _found(config, hidden, recompute, find).of(sizes, recompute)


def _found(config: Any, hidden: int, recompute: str, find: Callable[[], TowerCost]) -> TowerCost:
    key = (f"{type(config).__name__} {config!r} {recompute}", hidden)
    if key not in _FOUND:
        with quiet():
            _FOUND.setdefault(key, find())  # of two threads the first is right for both
    return _FOUND[key]


def _built(build: Callable[[ConfigT, int], ModuleT], config: ConfigT, hidden: int) -> ModuleT:
    """Return an encoder without storage."""
    with create_on("meta"):
        return build(config, hidden)


def _modules(forwards: Callable[[], Sequence[Any]]) -> list[Any]:
    return [forward.__self__ for forward in forwards()]


def _pixels(*shape: int) -> torch.Tensor:
    """Return pixels without a memory of their own, none of which is 0, as padding may be."""
    return torch.ones(()).expand(*shape)
