"""What a tower can do here, found out on a thin one: all its layers, small widths and images."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from mimo.model.runtime import Drawn, Split, TensorAxis, item_keys, step_key
from mimo_transformers.family import HfEncoderConfig, check_dropout, new_tower, without_refused
from mimo_transformers.model.small import affordable, constants_of, stir, thin_values
from mimo_transformers.tower.encoder import HfEncoder, features, refusal, rows_of
from mimo_transformers.trial.encoders import (
    TRIED,
    Tried,
    UnfitError,
    check_rows,
    check_same,
    draw_in,
    encoder_splits,
    idle_in,
    try_encoder,
)
from mimo_transformers.trial.record import recall
from mimo_transformers.trial.tensor_plan import TensorPlan, plans
from mimo_transformers.trial.two_ranks import PLAN, find_plan, right_plan, try_plan

_HIDDEN = 8
_IMAGES = 3
_ROWS_DIMS = 3


def build_encoder(config: HfEncoderConfig, hidden: int) -> HfEncoder:
    """Return the encoder of a config.

    Raises:
        ConfigError: a thin one doesn't compute of each image in a batch what the library computes of it alone, or it
            draws random numbers or changes what isn't trained; by its key, weights of attention would be dropped.
    """
    tried = tried_of(without_refused(config))
    if tried.problem:
        raise refusal(config, tried.problem)
    check_dropout(config, where="config.values")
    return HfEncoder(config, hidden, idle=tried.idle, constant=tried.constants.get)


def tried_of(config: HfEncoderConfig) -> Tried:
    """Return what was found of a thin tower of a config."""
    return _tried(_described(config))


def tensor_splits(encoder: HfEncoder, axis: TensorAxis) -> dict[str, Split]:
    """Hand ``axis`` to an encoder, and return how its parameters lie by `plan_of` its tower."""
    return {} if axis.size == 1 else encoder_splits(encoder, axis, plan_of(encoder.config))


def plan_of(config: HfEncoderConfig) -> TensorPlan:
    """Return the plan that was found right for a tower.

    Raises:
        ConfigError: there is none.
    """
    return right_plan(_plan(_described(config)), config.model_type)


def _described(config: HfEncoderConfig) -> str:
    """Return the thin tower of a config as text."""
    thin = thin_tower(config)
    keys = ("model_type", "values", "feature_layer")
    return json.dumps({key: getattr(thin, key) for key in keys}, sort_keys=True)


@cache
def _tried(description: str) -> Tried:
    config = HfEncoderConfig(**json.loads(description))
    return recall("tower", description, lambda: try_encoder(lambda: _try(config), Tried), TRIED)


@cache
def _plan(description: str) -> TensorPlan | str:
    config = HfEncoderConfig(**json.loads(description))
    return recall("tower plan", description, lambda: try_plan(lambda: _find_plan(config)), PLAN)


def thin_tower(config: HfEncoderConfig) -> HfEncoderConfig:
    """Return the config of a tower with all layers of another, of small widths and images."""
    values = thin_values(config.library())
    return HfEncoderConfig(model_type=config.model_type, values=values, feature_layer=config.feature_layer)


def _small(config: HfEncoderConfig) -> Any:
    library = config.library()
    return affordable(lambda: new_tower(library))


def _try(config: HfEncoderConfig) -> Tried:
    network = _small(config)
    constants = constants_of(network)
    network = stir(network)
    encoder = HfEncoder(config, _HIDDEN, constant=constants.get)
    encoder.read(network)
    pixels = torch.randn(_IMAGES, config.channels, config.side, config.side)
    items = [{"pixels": image} for image in pixels]
    wanted = torch.cat([features(network.eval(), image.unsqueeze(0), config)[0] for image in pixels])
    if not _in_order(network, pixels, config):
        raise UnfitError("rows that don't end with those of its patches")
    check_rows(encoder, lambda: encoder.tower_rows(items), wanted)
    _check_dropped(encoder, items)
    return Tried(idle=frozenset(idle_in(encoder.encoder, lambda: encoder.tower_rows(items))), constants=constants)


def _check_dropped(encoder: HfEncoder, items: Sequence[Mapping[str, Tensor]]) -> None:
    """Refuse a tower that drops of an image in a batch what it doesn't drop of it alone.

    Raises:
        UnfitError: saying by how much its rows differ.
    """
    keys = draw_in(encoder)
    if not keys.is_read:
        return
    with keys.at(_drawn(range(len(items)))):
        within = encoder.tower_rows(items)
    alone = []
    for number, item in enumerate(items):
        with keys.at(_drawn([number])):
            alone.append(encoder.tower_rows([item]))
    check_same(within, torch.cat(alone), ", with dropout")


def _drawn(images: Sequence[int]) -> Drawn:
    return Drawn(items=item_keys(step_key(0, 0), images, [0] * len(images)))


def _in_order(network: Any, pixels: Tensor, config: HfEncoderConfig) -> bool:
    """Tell whether the first row behind class tokens is that of the first patch, where embeddings can tell."""
    rows = rows_of(config)
    with torch.enable_grad():
        image = pixels[:1].clone().requires_grad_()
        embedded = network(pixel_values=image, output_hidden_states=True).hidden_states
        if not embedded or embedded[0].dim() != _ROWS_DIMS or embedded[0].shape[1] != rows.count:
            return True
        (gradient,) = torch.autograd.grad(
            (embedded[0][0, rows.prefix] * embedded[0][0, rows.prefix].detach()).sum(), image
        )
    side = config.side // rows.grid[0]
    return bool(gradient[..., :side, :side].any())


def _find_plan(config: HfEncoderConfig) -> TensorPlan | str:
    tried, network = tried_of(config), stir(_small(config))
    pixels = torch.randn(_IMAGES, config.channels, config.side, config.side)
    weights: list[Tensor] = []

    def make() -> nn.Module:
        encoder = HfEncoder(config, _HIDDEN, idle=tried.idle, constant=tried.constants.get)
        encoder.read(network)
        encoder.projector.requires_grad_(requires_grad=False)
        return encoder

    def run(encoder: nn.Module) -> Tensor:
        assert isinstance(encoder, HfEncoder)
        with draw_in(encoder).at(_drawn(range(_IMAGES))):  # the loss is another where what is dropped is cut
            rows = encoder.tower_rows([{"pixels": image} for image in pixels])
        if not weights:
            weights.append(torch.randn_like(rows))
        return (rows * weights[0]).sum()

    return find_plan(make, run, encoder_splits, plans(config.library(), None))
