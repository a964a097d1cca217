"""One linear layer for each expert, over rows that are sorted by expert, in one call.

Shapes: R rows, E experts, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from mimo.model.layers.deferred_weights import WeightGradQueue
from mimo.model.layers.low_rank import LowRank
from mimo.model.layers.products import Grouped, multiply
from mimo.model.layers.weights import initial_std
from mimo.topology.device_copies import to_device


class GroupedLinear(nn.Module):
    """``x @ weight[e].T + bias[e]`` for the rows of each expert e.

    Attributes:
        adds_bias: whether the bias is added here. An expert plan unsets it on all but the first of the ranks that each
            compute a part of the same outputs.
        weight_grad_queue: where weight gradients are deferred; `build_part` sets it.
        lora: what is added to the products; see `Linear`.
    """

    stays_eager = "how many rows each expert has differs from batch to batch"

    def __init__(self, experts: int, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(experts, outputs)) if bias else None
        self.adds_bias = True
        self.weight_grad_queue: WeightGradQueue | None = None
        self.lora: LowRank | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights, clear the biases."""
        nn.init.normal_(self.weight, std=initial_std(self.weight.shape[2]))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @property
    def draws(self) -> bool:
        """Whether what is added to it draws at random, by keys of the rows that it is given."""
        return self.lora is not None and self.lora.site is not None

    def forward(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Return [R, O] of ``x`` [R, I]; ``counts`` says how many rows each expert of this rank has, in order."""
        weight, form = cast("Tensor", self._parameters["weight"]), Grouped(counts)
        y = multiply(x, weight, form=form, weight_grad_queue=self.weight_grad_queue)
        y = y if self.lora is None else y + self.lora(x, form=form)
        if self.bias is None:
            return y
        each = to_device(torch.tensor(counts), y.device)
        rows = self.bias.repeat_interleave(each, dim=0, output_size=len(y))
        return y + rows if self.adds_bias else y + 0 * rows  # its gradient then is zero, and not missing
