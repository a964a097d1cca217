"""The dense feed-forward part of a decoder layer. Shapes: T rows, H hidden."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn import functional

from mimo.model.runtime import Linear, TensorAxis


class Mlp(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202).

    Attributes:
        axis: over which the intermediate width is split.
    """

    def __init__(self, hidden: int, intermediate: int, *, bias: bool) -> None:
        super().__init__()
        self.gate = Linear(hidden, intermediate, bias=bias)
        self.up = Linear(hidden, intermediate, bias=bias)
        self.down = Linear(intermediate, hidden, bias=bias)
        self.axis = TensorAxis.single()

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, H] of ``x`` [T, H]."""
        x = self.axis.enter(x)
        return self.finish(self.gate(x), self.up(x))

    def finish(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return [T, H] of the two products: cheap to compute again, beside what it keeps."""
        return cast("Tensor", self.down(functional.silu(gate) * up, leave=self.axis))
