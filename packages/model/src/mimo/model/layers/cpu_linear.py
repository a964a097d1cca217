"""Products of few rows on a CPU, as each token of a generated text needs them: the time is that of reading the weight.

PyTorch computes float32 products by MKL. For few rows others read faster, on CPUs that are not Intel's in particular,
where MKL takes its general code. R rows, I inputs, O outputs.
"""

from __future__ import annotations

from functools import cache
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

_ONEDNN_ROWS = 3
_ONEDNN_ELEMENTS = 1 << 17
"""Of a weight. With fewer rows or elements MKL is as fast or faster, where it has code for the CPU."""
_LEFT_ROWS = 8
_LEFT_INPUTS = 3072
"""Of all rows together. Measured with 1 to 12 rows of 64 to 4,096 inputs: up to here MKL's general code reads a large
enough weight up to twice as fast if it is the left factor, beyond it more slowly."""
_LEFT_ELEMENTS = 1 << 15


def linear_without_gradient(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias`` by what reads the weight fastest; its last bits depend on the number of rows.

    Args:
        x: [..., I].
        weight: [O, I].
        bias: [O].
    """
    plain = x.device.type != "cpu" or not x.dtype == weight.dtype == torch.float32
    if plain or torch.compiler.is_compiling():
        return functional.linear(x, weight, bias)
    inputs, elements = weight.shape[1], weight.numel()
    rows, general = x.numel() // max(inputs, 1), mkl_is_general()
    if general and 0 < rows <= min(_LEFT_ROWS, _LEFT_INPUTS // inputs) and elements >= _LEFT_ELEMENTS:
        return _with_weight_left(x.reshape(rows, inputs), weight, bias).view(*x.shape[:-1], -1)
    if rows >= (1 if general else _ONEDNN_ROWS) and elements >= _ONEDNN_ELEMENTS and _has_onednn():
        return cast("Tensor", torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], ""))  # noqa: SLF001 - no other
    return functional.linear(x, weight, bias)


def _with_weight_left(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return [R, O]. One row is multiplied with two halves, as MKL has a faster kernel for several products at once."""
    outputs, inputs = weight.shape
    if len(x) == 1 and outputs % 2 == 0:
        halves = weight.reshape(2, outputs // 2, inputs)
        y = torch.bmm(halves, x.t().expand(2, inputs, 1)).view(1, outputs)
    else:
        y = torch.mm(weight, x.t()).t().contiguous()
    return y if bias is None else y.add_(bias)


@cache
def mkl_is_general() -> bool:
    """Tell whether MKL is what multiplies, on a CPU for which it has no code of its own."""
    return torch.backends.mkl.is_available() and "AMD" in str(torch.cpu.get_capabilities().get("cpu_name"))


@cache
def _has_onednn() -> bool:
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")
