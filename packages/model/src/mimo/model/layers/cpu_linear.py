"""Products of few rows on a CPU, as each token of a generated text needs them: the time is that of reading the weight.

PyTorch computes float32 products by MKL. With few rows, oneDNN reads a large weight faster; and on AMD's CPUs, for
which MKL has general code only, so does MKL itself if the weight is the left factor. R rows, I inputs, O outputs.
"""

from __future__ import annotations

from functools import cache
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

_ONEDNN_ROWS = 3
_ONEDNN_ELEMENTS = 1 << 17
"""Elements of a weight from which on oneDNN is faster; with fewer rows it is not, where MKL has code for the CPU."""
_LEFT_ROWS = 8
_LEFT_INPUTS = 3072
"""Rows times inputs up to which MKL's general code is faster, up to twice, with the weight as the left factor, as
measured with 1 to 12 rows of 64 to 4,096 inputs."""
_LEFT_ELEMENTS = 1 << 15
"""Elements of a weight from which on that shows."""


def linear_without_gradient(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias`` by what reads the weight fastest; its last bits depend on the number of rows.

    A compiled graph chooses by itself.

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
    """Tell whether MKL multiplies with general code: on AMD's CPUs, as far as their names say so."""
    return torch.backends.mkl.is_available() and "AMD" in str(torch.cpu.get_capabilities().get("cpu_name"))


@cache
def _has_onednn() -> bool:
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")
