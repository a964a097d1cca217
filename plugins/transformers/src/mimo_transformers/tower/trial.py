"""What a tower can do here, found out on a thin one: all its layers, small widths and images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from mimo.hooks import UserError
from mimo.model.runtime import Split, TensorAxis
from mimo_transformers.family import HfEncoderConfig, new_tower
from mimo_transformers.model.small import affordable, constants_of, stir, thin_values, trying
from mimo_transformers.tower.encoder import HfEncoder, features, refusal, rows_of
from mimo_transformers.trial.tensor_plan import Heads, TensorPlan, plans, split_linears
from mimo_transformers.trial.two_ranks import find_plan, right_plan

_HIDDEN = 8
_IMAGES = 3
_TOLERANCE = 1e-5
_ROWS_DIMS = 3


@attrs.frozen(kw_only=True)
class Tried:
    """What a trial has found.

    Args:
        problem: why it can't be trained, empty if it can.
        idle: paths in the tower of parameters on which nothing depends that is handed on.
        constants: what begins with the same number everywhere, by general path.
    """

    problem: str = ""
    idle: frozenset[str] = frozenset()
    constants: Mapping[str, float] = attrs.field(factory=dict)


_TRIED: dict[str, Tried] = {}
_PLANS: dict[str, TensorPlan | str] = {}


def build_encoder(config: HfEncoderConfig, hidden: int) -> HfEncoder:
    """Return the encoder of a config.

    Raises:
        ConfigError: a thin one doesn't compute of each image in a batch what the library computes of it alone, or it
            draws random numbers or changes what isn't trained.
    """
    tried = tried_of(config)
    if tried.problem:
        raise refusal(config, tried.problem)
    return HfEncoder(config, hidden, idle=tried.idle, constant=tried.constants.get)


def tried_of(config: HfEncoderConfig) -> Tried:
    """Return what was found of a thin tower of a config."""
    key = repr(config)
    if key not in _TRIED:
        try:
            with trying():
                _TRIED[key] = _try(thin_tower(config))
        except UserError as error:
            _TRIED[key] = Tried(problem=str(error))
        except Exception as error:  # noqa: BLE001 - whatever a model of the library does
            _TRIED[key] = Tried(problem=f"a thin one that fails with {type(error).__name__}: {error}")
    return _TRIED[key]


def tensor_splits(encoder: HfEncoder, axis: TensorAxis) -> dict[str, Split]:
    """Hand ``axis`` to an encoder, and return how its parameters lie by `plan_of` its tower."""
    if axis.size == 1:
        return {}
    return split_linears(encoder.encoder, axis, plan_of(encoder.config), heads=Heads(), at="encoder")


def plan_of(config: HfEncoderConfig) -> TensorPlan:
    """Return the plan that was found right for a tower.

    Raises:
        ConfigError: there is none.
    """
    key = repr(config)
    if key not in _PLANS:
        with trying():
            _PLANS[key] = _plan_of(thin_tower(config))
    return right_plan(_PLANS[key], config.model_type)


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
    fixed = {name: tensor.clone() for name, tensor in _fixed(encoder)}
    chance = torch.get_rng_state()
    found = encoder.tower_rows(items)
    if not _in_order(network, pixels, config):
        return Tried(problem="rows that don't end with those of its patches")
    if not torch.equal(chance, torch.get_rng_state()):
        return Tried(problem="a thin one draws random numbers while it trains")
    difference = float((found - wanted).abs().max() / wanted.abs().max())
    if not difference <= _TOLERANCE:
        return Tried(problem=f"rows of a thin one that differ by {difference:.1e} in a batch of images")
    if changed := [name for name, tensor in _fixed(encoder) if not torch.equal(tensor, fixed[name])]:
        return Tried(problem=f"{', '.join(changed)} of a thin one that change while it trains")
    with torch.enable_grad():
        rows = encoder.tower_rows(items)
        (rows * torch.randn_like(rows)).sum().backward()
    idle = frozenset(name for name, parameter in encoder.encoder.named_parameters() if parameter.grad is None)
    return Tried(idle=idle, constants=constants)


def _fixed(encoder: HfEncoder) -> Iterator[tuple[str, Tensor]]:
    """Yield what nothing trains: buffers, and those that have become parameters since they are saved."""
    yield from encoder.named_buffers()
    yield from ((name, one.detach()) for name, one in encoder.named_parameters() if not one.requires_grad)


def _in_order(network: Any, pixels: Tensor, config: HfEncoderConfig) -> bool:
    """Tell whether the first row behind class tokens is that of the first patch, where embeddings can tell."""
    rows = rows_of(config)
    with torch.enable_grad():
        image = pixels[:1].clone().requires_grad_()
        embedded = network(pixel_values=image, output_hidden_states=True).hidden_states
        count = rows.prefix + rows.grid[0] * rows.grid[1]
        if not embedded or embedded[0].dim() != _ROWS_DIMS or embedded[0].shape[1] != count:
            return True
        (gradient,) = torch.autograd.grad(
            (embedded[0][0, rows.prefix] * embedded[0][0, rows.prefix].detach()).sum(), image
        )
    side = config.side // rows.grid[0]
    return bool(gradient[..., :side, :side].any())


def _plan_of(config: HfEncoderConfig) -> TensorPlan | str:
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
        rows = encoder.tower_rows([{"pixels": image} for image in pixels])
        if not weights:
            weights.append(torch.randn_like(rows))
        return (rows * weights[0]).sum()

    def split(encoder: nn.Module, axis: TensorAxis, plan: TensorPlan) -> Mapping[str, Split]:
        assert isinstance(encoder, HfEncoder)
        return split_linears(encoder.encoder, axis, plan, heads=Heads(), at="encoder")

    return find_plan(make, run, split, plans(config.library(), None))
