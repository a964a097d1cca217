"""The short causal convolution in front of a Mamba-2 scan: each column by itself, within each sample.

Shapes: T rows, W columns, K taps, of which the last is the row's own.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mimo.model.layers.chunked_scan import SampleChunks, has_kernels


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, chunks: SampleChunks) -> Tensor:
    """Return SiLU of the convolution of ``x``, [T, W]; what lies before a sample's first row counts as 0.

    Args:
        x: [T, W].
        weight: [W, K].
        bias: [W].
        chunks: of the T rows.
    """
    if x.numel() and has_kernels(x.device, "causal_conv1d") and _kernel_takes(x, weight):
        return convolve_by_kernel(x, weight, bias, chunks)
    y = x * weight[:, -1] if bias is None else torch.addcmul(bias, x, weight[:, -1])
    for back in range(1, min(weight.shape[1], max(1, x.shape[0]))):
        earlier = functional.pad(x[:-back], (0, 0, back, 0)) * (chunks.ages >= back).to(x).unsqueeze(1)
        y = torch.addcmul(y, earlier, weight[:, -1 - back])
    return functional.silu(y)


def convolve_continued(seen: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the same of more rows of samples, [..., T, W], by the same sums in the same order; see `convolve`.

    Args:
        seen: [..., K - 1 + T, W], the rows before these at first, 0 where there are none.
        weight: [W, K].
        bias: [W].
    """
    taps = weight.shape[1]
    rows = seen.shape[-2] - taps + 1
    x = seen.narrow(-2, taps - 1, rows)
    y = x * weight[:, -1] if bias is None else torch.addcmul(bias, x, weight[:, -1])
    for back in range(1, taps):
        y = torch.addcmul(y, seen.narrow(-2, taps - 1 - back, rows), weight[:, -1 - back])
    return functional.silu(y)


def _kernel_takes(x: Tensor, weight: Tensor) -> bool:
    """Tell whether that of `causal_conv1d` does, which checks strides too: those of a single row may be any."""
    return 2 <= weight.shape[1] <= 4 and x.shape[1] % 8 == 0 and x.shape[0] > 1 and x.element_size() <= 4  # noqa: PLR2004


def convolve_by_kernel(x: Tensor, weight: Tensor, bias: Tensor | None, chunks: SampleChunks) -> Tensor:
    """Return the same by the kernel of `causal_conv1d`, whose rows lie one after the other as ours do."""
    kernels: Any = importlib.import_module("causal_conv1d")
    found: Tensor = kernels.causal_conv1d_fn(
        x.contiguous().t().unsqueeze(0),
        weight.contiguous(),
        bias,
        seq_idx=chunks.samples.int().unsqueeze(0),
        activation="silu",
    )
    return found.squeeze(0).t()
