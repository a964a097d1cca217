"""The built-in plugin ``adamw``: parameters replicated over the data lanes, stepped by torch's fused AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import attrs

from mimo.hooks import above_zero, check_at_most, from_zero, hookimpl, must_be
from mimo.optimizer._specs import ModuleParameters, OptimizerSpec, Prepared
from mimo.optimizer.estimates import WEIGHT_BYTES, Estimates, StateBytes, SteppedShapes, adamw_state

if TYPE_CHECKING:
    import torch
    from torch import nn

    from mimo.topology.meshes import Meshes


_WHERE = "optimizer"

betas_below_one = must_be(
    "two numbers from 0 to below 1", lambda betas: all(0 <= beta < 1 for beta in betas), where=_WHERE
)
"""Validator of the two shares of Adam's averages that stay at each step."""


@attrs.frozen(kw_only=True)
class AdamWConfig:
    """Settings of AdamW (Loshchilov and Hutter 2019)."""

    weight_decay: float = attrs.field(default=0.01, validator=from_zero(where=_WHERE))
    betas: tuple[float, float] = attrs.field(default=(0.9, 0.95), validator=betas_below_one)
    eps: float = attrs.field(default=1e-8, validator=above_zero(where=_WHERE))

    def __attrs_post_init__(self) -> None:
        """Refuse numbers with which no step could be taken."""
        check_at_most(self, {"weight_decay": 1e3, "eps": 1e3}, where=_WHERE)


Moments: TypeAlias = Literal["fp32", "bf16"]


@attrs.frozen(kw_only=True)
class LocalAdamWConfig(AdamWConfig):
    """Settings of `mimo.optimizer.runtime.LocalAdamW`: those of AdamW, and in what its moments lie.

    Args:
        moments: in bf16 they take half the memory and half of a checkpoint's; see `docs/precision.md`.
    """

    moments: Moments = attrs.field(
        default="fp32", validator=must_be("fp32 or bf16", lambda kind: kind in get_args(Moments), where=_WHERE)
    )


def build_adamw(
    parameters: Mapping[str, nn.Parameter], config: LocalAdamWConfig, _meshes: Meshes
) -> torch.optim.Optimizer:
    """Return a `mimo.optimizer.runtime.LocalAdamW`, as `OptimizerSpec.build` does."""
    import torch

    from mimo.optimizer.runtime import LocalAdamW

    return LocalAdamW(
        parameters.values(),
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        moments=torch.bfloat16 if config.moments == "bf16" else torch.float32,
    )


def local_adamw_state(stepped: SteppedShapes, config: LocalAdamWConfig) -> StateBytes:
    """Return what `mimo.optimizer.runtime.LocalAdamW` holds: two moments, and one number that counts steps."""
    return adamw_state(stepped, moment_bytes=2 if config.moments == "bf16" else WEIGHT_BYTES)


def _prepare(part: ModuleParameters, meshes: Meshes, _config: AdamWConfig) -> Prepared:
    from mimo.optimizer.runtime import replicate

    return replicate(part, meshes)


@hookimpl
def mimo_register_optimizers() -> list[OptimizerSpec]:
    """Register ``adamw``."""
    return [
        OptimizerSpec(
            name="adamw",
            config=LocalAdamWConfig,
            rendezvous=lambda _config: False,
            prepare=_prepare,
            build=build_adamw,
            estimates=Estimates(state=local_adamw_state),
        )
    ]
