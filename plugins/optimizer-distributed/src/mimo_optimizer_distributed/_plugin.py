"""The plugin ``distributed``: AdamW, with state, gradients or parameters spread over data lanes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from mimo.hooks import hookimpl
from mimo.optimizer import AdamWConfig, OptimizerSpec
from mimo.optimizer.estimates import Estimates
from mimo_optimizer_distributed.estimates import laid, sent
from mimo_optimizer_distributed.sharding import (
    LAYS,
    PRECISIONS,
    Sharding,
    gathers_inside,
    lanes_of,
    overlaps,
    shard,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from mimo.topology.meshes import Meshes


@attrs.frozen(kw_only=True)
class DistributedConfig(AdamWConfig, Sharding):
    """Settings of AdamW, and how its parameters are spread."""


def _build(parameters: Mapping[str, nn.Parameter], config: DistributedConfig, _meshes: Meshes) -> torch.optim.Optimizer:
    from mimo.optimizer.runtime import LocalAdamW

    return LocalAdamW(parameters.values(), betas=config.betas, eps=config.eps, weight_decay=config.weight_decay)


DISTRIBUTED = OptimizerSpec(
    name="distributed",
    config=DistributedConfig,
    rendezvous=gathers_inside,
    overlaps=overlaps,
    shard_lanes=lanes_of,
    precisions=PRECISIONS,
    lays=LAYS,
    prepare=shard,
    build=_build,
    estimates=Estimates(laid=laid, sent=sent),
)


@hookimpl
def mimo_register_optimizers() -> list[OptimizerSpec]:
    """Register ``distributed``."""
    return [DISTRIBUTED]
