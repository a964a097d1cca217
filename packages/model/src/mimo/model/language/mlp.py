"""The dense feed-forward part of a layer. Shapes: T rows, H hidden."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn import functional

from mimo.model.layers import Linear
from mimo.model.parallel import TensorAxis
from mimo.model.spec import MlpConfig


def activated(up: Tensor, gate: Tensor | None) -> Tensor:
    """Return what goes down again: gated by SiLU (Shazeer 2020, arXiv:2002.05202), else the squared ReLU.

    The latter is that of So et al. 2021, arXiv:2109.08668.
    """
    return functional.relu(up).square() if gate is None else functional.silu(gate) * up


class Mlp(nn.Module):
    """Up, `activated`, and down again.

    Attributes:
        axis: over which the intermediate width is split.
    """

    def __init__(self, config: MlpConfig, intermediate: int) -> None:
        super().__init__()
        self.gate = Linear(config.hidden, intermediate, bias=config.mlp_bias) if config.gated else None
        self.up = Linear(config.hidden, intermediate, bias=config.mlp_bias)
        self.down = Linear(intermediate, config.hidden, bias=config.mlp_bias)
        self.axis = TensorAxis.single()

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, H] of ``x`` [T, H]."""
        x = self.axis.enter(x)
        return self.finish(self.up(x), None if self.gate is None else self.gate(x))

    def finish(self, up: Tensor, gate: Tensor | None) -> Tensor:
        """Return [T, H] of the first products: cheap to compute again, beside what it keeps."""
        return cast("Tensor", self.down(activated(up, gate), leave=self.axis))
