"""Layers that compute on the local pieces of their parameters, whole or split over tensor ranks.

Each draws its own initial values in ``reset_parameters``; that is what lets `build_part` make them from seed and
name alone. Shapes: T rows, I inputs, O outputs, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from mimo.model.runtime._axis import TensorAxis
from mimo.model.runtime._deferral import Deferral
from mimo.model.runtime._multiply import multiply
from mimo.model.runtime._parameters import local
from mimo.model.runtime._rowwise import rms_norm

if TYPE_CHECKING:
    from mimo.model.runtime._low_rank import LowRank


def initial_std(width: int) -> float:
    """Return the standard deviation of weights that read rows of ``width``.

    Variance 1 / (3 width), that of `torch.nn.Linear` (LeCun et al. 1998, section 4.6, for its uniform draw): signals
    neither die in a narrow model nor grow in a wide one. It is GPT-2's 0.02 at a width of 833.
    """
    return float((3 * width) ** -0.5)


class Linear(nn.Module):
    """``x @ weight.T + bias``; column- or row-parallel by where `TensorAxis.enter` and ``leave`` stand around it.

    Attributes:
        outputs: which outputs this rank computes, None for all of its piece. A tensor plan sets it where weights are
            copied on every rank but the work is not (``Split(summed=True)``).
        deferral: where weight gradients may be put off; `build_part` sets it.
        lora: what is added to the product; `build_part` sets it. The attribute ``weight`` is then what both come to.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.outputs: slice | None = None
        self.deferral: Deferral | None = None
        self.lora: LowRank | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight, clear the bias."""
        nn.init.normal_(self.weight, std=initial_std(self.weight.shape[1]))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, *, leave: TensorAxis | None = None) -> Tensor:
        """Return [T, O] of ``x`` [T, I].

        With ``leave``, the product is row-parallel: the partial sums leave that axis, then the bias is added once.
        """
        weight = cast("Tensor", self._parameters["weight"])  # by itself, whatever stands beside it
        if leave is None or leave.size == 1:
            y = multiply(x, weight, self.bias, outputs=self.outputs, deferral=self.deferral)
            return y if self.lora is None else y + self.lora(x, outputs=self.outputs)
        y = multiply(x, weight, outputs=self.outputs, deferral=self.deferral)
        y = leave.leave(y if self.lora is None else y + self.lora(x, outputs=self.outputs))
        if self.bias is None:
            return y
        bias = local(self.bias)
        return y + (bias if self.outputs is None else bias[self.outputs])


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
        return rms_norm(x, local(self.weight), self.eps)


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
        weight = local(self.weight)
        return functional.layer_norm(x, weight.shape, weight, local(self.bias), self.eps)


class Embedding(nn.Module):
    """One row for each id; with an ``axis``, each tensor rank holds a span of the ids.

    Attributes:
        axis: set by a tensor plan that splits the weight along dim 0.
    """

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.count = count
        self.weight = nn.Parameter(torch.empty(count, width))
        self.axis = TensorAxis.single()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the rows."""
        nn.init.normal_(self.weight, std=initial_std(self.weight.shape[1]))

    def forward(self, ids: Tensor) -> Tensor:
        """Return [T, H] of ``ids`` [T]; with sequence parallelism this rank's [T/t, H]."""
        weight = local(self.weight, fresh=True)
        if self.axis.size == 1:
            return functional.embedding(ids, weight)
        span = self.axis.span(self.count)
        if not span:
            # Zeros that keep the path to the weight: backward's collectives must run on this rank too.
            found = weight.new_zeros(ids.shape[0], 0) @ weight
        else:
            here = (ids >= span.start) & (ids < span.stop)
            rows = functional.embedding((ids - span.start).clamp(0, len(span) - 1), weight)
            found = rows.masked_fill(~here.unsqueeze(-1), 0.0)
        return self.axis.leave(found)
