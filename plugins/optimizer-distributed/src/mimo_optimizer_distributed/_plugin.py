"""The plugin ``distributed``: AdamW, with state, gradients or parameters spread over data lanes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from mimo.hooks import hookimpl
from mimo.optimizer import AdamWConfig, OptimizerSpec
from mimo_optimizer_distributed.sharding import Sharding
from mimo_optimizer_distributed.spec import sharded_optimizer

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


DISTRIBUTED = sharded_optimizer(name="distributed", config=DistributedConfig, build=_build)


@hookimpl
def mimo_register_optimizers() -> list[OptimizerSpec]:
    """Register ``distributed``."""
    return [DISTRIBUTED]
