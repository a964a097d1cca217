"""The plugin ``distributed``: AdamW, with state, gradients or parameters spread over data lanes."""

from __future__ import annotations

import attrs

from mimo.hooks import hookimpl
from mimo.optimizer import LocalAdamWConfig, OptimizerSpec, build_adamw, local_adamw_state
from mimo_optimizer_distributed.sharding import Sharding
from mimo_optimizer_distributed.spec import sharded_optimizer


@attrs.frozen(kw_only=True)
class DistributedConfig(LocalAdamWConfig, Sharding):
    """Settings of AdamW, and how its parameters are spread."""


DISTRIBUTED = sharded_optimizer(
    name="distributed", config=DistributedConfig, build=build_adamw, state=local_adamw_state
)


@hookimpl
def mimo_register_optimizers() -> list[OptimizerSpec]:
    """Register ``distributed``."""
    return [DISTRIBUTED]
