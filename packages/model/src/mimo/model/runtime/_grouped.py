"""One linear layer for each expert, over rows that are sorted by expert, in one call.

Shapes: R rows, E experts, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from mimo.model.runtime._layers import initial_std
from mimo.model.runtime._parameters import local

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT = 16  # bytes


class GroupedLinear(nn.Module):
    """``x @ weight[e].T`` for the rows of each expert e; it has no bias."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights."""
        nn.init.normal_(self.weight, std=initial_std(self.weight.shape[2]))

    def forward(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Return [R, O] of ``x`` [R, I]; ``counts`` says how many rows each expert of this rank has, in order."""
        return grouped_linear(x, local(self.weight, fresh=True), counts)


def grouped_linear(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """Return ``x @ weight[e].T`` [R, O] for each expert's rows.

    Args:
        x: [R, I], the rows of the first expert before those of the next.
        weight: [E, O, I].
        counts: rows of each expert, 0 included; their sum is R.
    """
    if _suits_kernel(x, weight):
        ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(x.device)
        return functional.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    parts = [functional.linear(part, each) for part, each in zip(x.split(list(counts)), weight.unbind(0), strict=True)]
    return torch.cat(parts)


def _suits_kernel(x: Tensor, weight: Tensor) -> bool:
    """Tell whether torch's grouped product takes these: no double precision, nothing empty, aligned rows."""
    width = x.element_size()
    aligned = all(size * width % _ALIGNMENT == 0 for size in weight.shape[1:])
    return x.dtype in _DTYPES and aligned and x.numel() > 0 and weight.numel() > 0
