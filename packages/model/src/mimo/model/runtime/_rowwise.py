"""Row-wise operations in as few passes over memory as they need, forward and backward.

PyTorch puts these together on the CPU from small steps, each of which reads and writes all rows again; with tensor
parallelism every tensor rank pays that for the same rows. Shapes: T rows, H hidden, N heads, D head width.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional


class _RmsNorm(torch.autograd.Function):
    """``x / rms(x) * weight``, in float32 on the CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scales = norms.square_().div_(x.shape[-1]).add_(eps).rsqrt_()  # [T, 1]
        normed = x * scales
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
    return cast("Tensor", _RmsNorm.apply(x, weight, eps))  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _is_faster(x: Tensor, weight: Tensor) -> bool:
    """Tell whether what is written here beats what torch has."""
    return x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32


class _Turn(torch.autograd.Function):
    """A rotation; its adjoint turns back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return _turned(x, cosines, sines)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cosines, sines = ctx.saved_tensors
        return _turned(gradients[0], cosines, -sines), None, None


def _turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    one, other = wide.chunk(2, -1)
    turned = torch.empty_like(wide, memory_format=torch.contiguous_format)
    into_one, into_other = turned.chunk(2, -1)
    torch.mul(one, cosines, out=into_one).addcmul_(other, sines, value=-1)
    torch.mul(other, cosines, out=into_other).addcmul_(one, sines)
    return turned.to(x.dtype)


def turn(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Return ``x`` [T, N, D] with columns i and i + D / 2 turned by the angles of cosines, sines [T, 1, D / 2]."""
    return cast("Tensor", _Turn.apply(x, cosines, sines))  # type: ignore[no-untyped-call]  # torch leaves it untyped
