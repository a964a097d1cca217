"""Rows as models pack them, and by how much rows that were computed are off, as shares of what rounding allows."""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import MappingProxyType

import attrs
import torch
from torch import Tensor


@attrs.frozen
class Rounding:
    """What a row may be off by, in roundings of its kind of number (`torch.finfo(...).eps`).

    Args:
        value: of its own size.
        gradient: likewise.
    """

    value: float
    gradient: float


ALLOWED: Mapping[torch.dtype, Rounding] = MappingProxyType(
    {
        torch.bfloat16: Rounding(4, 8),
        torch.float16: Rounding(4, 8),
        torch.float32: Rounding(32, 64),
        torch.float64: Rounding(32, 64),
    }
)
"""Sums are taken in fp32 where numbers have 16 bits, so that only what is kept is rounded; in the others, all."""


def chat(rows: int, samples: int) -> list[int]:
    """Return lengths of samples of a chat that fill so many rows; a few are long."""
    draw = random.Random(7)
    shares = [draw.lognormvariate(0, 0.8) for _ in range(samples)]
    ends = [round(rows * sum(shares[: index + 1]) / sum(shares)) for index in range(samples)]
    return [stop - start for start, stop in zip([0, *ends], ends, strict=False)]


def images(count: int, *, most: int = 24) -> list[int]:
    """Return the patches of as many images of free size, of a third of ``most`` to ``most`` down and across."""
    draw = random.Random(7)
    least = max(1, most // 3)
    return [draw.randint(least, most) * draw.randint(least, most) for _ in range(count)]


def worst_row(found: Tensor, truth: Tensor) -> float:
    """Return by how much the worst row [..., D] is off, as a share of its norm, or of the mean row's if that is larger.

    What is not finite is infinitely wrong.
    """
    truth = truth.detach().double().flatten(0, -2)
    off = (found.detach().double().flatten(0, -2) - truth).norm(dim=1)
    sizes = truth.norm(dim=1)
    shares = off / sizes.clamp_min(float(sizes.square().mean().sqrt()) or 1.0)
    return float(shares.nan_to_num(nan=torch.inf).max())


def shares_of(
    dtype: torch.dtype, value: tuple[Tensor, Tensor], gradients: Mapping[str, tuple[Tensor, Tensor]]
) -> dict[str, float]:
    """Return shares of what is allowed by name, at most 1 where all is right.

    Args:
        dtype: that was computed in.
        value: what was found, and the truth.
        gradients: likewise, by name.
    """
    eps, allowed = torch.finfo(dtype).eps, ALLOWED[dtype]
    found = {"value": worst_row(*value) / (allowed.value * eps)}
    found |= {f"gradient of {name}": worst_row(*both) / (allowed.gradient * eps) for name, both in gradients.items()}
    return {name: float(f"{share:.3g}") for name, share in found.items()}
