"""The built-in plugin ``adamw``: parameters replicated over the data lanes, stepped by torch's fused AdamW."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from mimo.hooks import ConfigError, check_at_most, hookimpl
from mimo.optimizer._specs import ModuleParameters, OptimizerSpec, Prepared

if TYPE_CHECKING:
    import torch
    from torch import nn

    from mimo.topology.meshes import Meshes


def _not_negative(_instance: AdamWConfig, attribute: attrs.Attribute[float], value: float) -> None:
    if not 0 <= value < math.inf:
        raise ConfigError(f"optimizer.{attribute.name}", expected="a finite number of 0 or more", got=repr(value))


def _above_zero(_instance: AdamWConfig, attribute: attrs.Attribute[float], value: float) -> None:
    if not 0 < value < math.inf:  # by 0, a number without a gradient would be divided by 0
        raise ConfigError(f"optimizer.{attribute.name}", expected="a finite number above 0", got=repr(value))


def _below_one(_instance: AdamWConfig, _attribute: object, betas: tuple[float, float]) -> None:
    if not all(0 <= beta < 1 for beta in betas):
        raise ConfigError("optimizer.betas", expected="two numbers from 0 to below 1", got=repr(betas))


@attrs.frozen(kw_only=True)
class AdamWConfig:
    """Settings of AdamW (Loshchilov and Hutter 2019)."""

    weight_decay: float = attrs.field(default=0.01, validator=_not_negative)
    betas: tuple[float, float] = attrs.field(default=(0.9, 0.95), validator=_below_one)
    eps: float = attrs.field(default=1e-8, validator=_above_zero)

    def __attrs_post_init__(self) -> None:
        """Refuse numbers with which no step could be taken."""
        check_at_most(self, {"weight_decay": 1e3, "eps": 1e3}, where="optimizer")


def _prepare(part: ModuleParameters, meshes: Meshes, _config: AdamWConfig) -> Prepared:
    from mimo.optimizer.runtime import replicate

    return replicate(part, meshes)


def _build(parameters: Mapping[str, nn.Parameter], config: AdamWConfig, _meshes: Meshes) -> torch.optim.Optimizer:
    from mimo.optimizer.runtime import LocalAdamW

    return LocalAdamW(parameters.values(), betas=config.betas, eps=config.eps, weight_decay=config.weight_decay)


@hookimpl
def mimo_register_optimizers() -> list[OptimizerSpec]:
    """Register ``adamw``."""
    return [
        OptimizerSpec(
            name="adamw", config=AdamWConfig, rendezvous=lambda _config: False, prepare=_prepare, build=_build
        )
    ]
