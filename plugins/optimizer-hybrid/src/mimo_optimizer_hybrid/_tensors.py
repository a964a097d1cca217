"""What both halves of the optimizer need to know of a tensor, and with what they step it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

import attrs
from torch import Tensor
from torch.distributed.tensor import DTensor

from mimo.optimizer import GRADIENT_SCALE
from mimo.topology.meshes import laid_out, local


def mean_numbers(value: Tensor) -> float:
    """Return how many numbers a rank holds of ``value``, on average over its mesh: the same on all of its ranks."""
    if not isinstance(value, DTensor):
        return value.numel()
    pieces = math.prod(
        size for size, placement in zip(value.device_mesh.shape, value.placements, strict=True) if placement.is_shard()
    )
    return value.numel() / pieces


def shaped_like(value: Tensor, flat: Tensor) -> Tensor:
    """Return the numbers of ``flat`` in the shape of ``value``, a DTensor if it is one, wherever ``flat`` lies."""
    return laid_out(flat.view(local(value).shape), like=value)


def sight(value: Tensor) -> tuple[int, int, int]:
    """Return what differs as soon as torch has written to ``value``, or it has other storage."""
    own = local(value)
    return own.data_ptr(), value._version, own._version  # noqa: SLF001  # what autograd itself relies on


@attrs.frozen(kw_only=True)
class Settings:
    """With what a parameter is stepped, as its group said when the step began."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    scale: float

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Self:
        """Return those of a parameter group."""
        return cls(
            lr=float(group["lr"]),
            betas=tuple(group["betas"]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            scale=float(group[GRADIENT_SCALE]),
        )

    @property
    def group(self) -> dict[str, Any]:
        """As a parameter group has them."""
        settings = {"lr": self.lr, "betas": self.betas, "eps": self.eps, "weight_decay": self.weight_decay}
        return {**settings, GRADIENT_SCALE: self.scale}
