"""Norms of rows in as few passes over memory as they need, forward and backward.

PyTorch puts them together on the CPU from small steps, each of which reads and writes all rows again; with tensor
parallelism every tensor rank pays that for the same rows. Shapes: T rows, H hidden.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

_FEW = 1 << 15
"""Elements up to which PyTorch's own is faster: it takes more steps, each of which costs less to begin."""


def _normed(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return ``x`` [..., H] divided by the root mean square of each row, and one over that, [..., 1]."""
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scales = norms.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return x * scales, scales


class _RmsNorm(torch.autograd.Function):
    """``x / rms(x) * weight``, in float32 on the CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, scales = _normed(x, eps)
        ctx.save_for_backward(normed, scales, weight)
        scaled: Tensor = normed * weight
        return scaled

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, scales, weight = ctx.saved_tensors
        products = gradients[0] * normed
        for_weight = products.flatten(0, -2).sum(0)
        along = torch.matmul(products, weight).div_(-normed.shape[-1]).unsqueeze(-1)  # what the length takes away
        for_x = torch.mul(gradients[0], weight, out=products).addcmul_(normed, along).mul_(scales)
        return for_x, for_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x`` [..., H] divided by the root mean square of each row, times ``weight`` [H]."""
    if not _is_faster(x, weight):
        return functional.rms_norm(x, weight.shape, weight, eps)
    if not torch.is_grad_enabled():  # a graph's node takes as long as all of it does of a single row
        few = x.numel() <= _FEW
        return functional.rms_norm(x, weight.shape, weight, eps) if few else _normed(x, eps)[0] * weight
    return cast("Tensor", _RmsNorm.apply(x, weight, eps))  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _is_faster(x: Tensor, weight: Tensor) -> bool:
    """Tell whether what is written here beats what torch has, or would make of it."""
    return not torch.compiler.is_compiling() and x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32


class RMSNorm(nn.Module):
    """Division by the root mean square, scaled (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the scale to one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., H] of ``x`` [..., H]."""
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """Standardisation over the width, scaled and shifted (Ba et al. 2016, arXiv:1607.06450)."""

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))
        self.eps = eps
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set scale to one and shift to zero."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, H] of ``x`` [T, H]."""
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
