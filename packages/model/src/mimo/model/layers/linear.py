"""Layers that compute on the local pieces of their parameters, whole or split over tensor ranks.

Each draws its own initial values in ``reset_parameters``; that is what lets `build_part` make them from seed and
name alone. Shapes: T rows, I inputs, O outputs, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from mimo.model.layers.deferred_weights import WeightGradQueue
from mimo.model.layers.low_rank import LowRank
from mimo.model.layers.products import multiply
from mimo.model.layers.weights import initial_std
from mimo.model.parallel import TensorAxis


class Linear(nn.Module):
    """``x @ weight.T + bias``; column- or row-parallel by where `TensorAxis.enter` and ``leave`` stand around it.

    Attributes:
        outputs: which outputs this rank computes, None for all of its piece. A tensor plan sets it where weights are
            copied on every rank but the work is not (``Split(summed=True)``).
        weight_grad_queue: where weight gradients are deferred; `build_part` sets it.
        lora: what is added to the product; `build_part` sets it. The attribute ``weight`` is then what both come to.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.outputs: slice | None = None
        self.weight_grad_queue: WeightGradQueue | None = None
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
            y = multiply(x, weight, self.bias, outputs=self.outputs, weight_grad_queue=self.weight_grad_queue)
            return y if self.lora is None else y + self.lora(x, outputs=self.outputs)
        y = multiply(x, weight, outputs=self.outputs, weight_grad_queue=self.weight_grad_queue)
        y = leave.leave(y if self.lora is None else y + self.lora(x, outputs=self.outputs))
        if self.bias is None:
            return y
        return y + (self.bias if self.outputs is None else self.bias[self.outputs])


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
        weight = self.weight
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
