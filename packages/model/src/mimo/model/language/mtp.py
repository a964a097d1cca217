"""Multi-token prediction: a module that predicts one token after the next (DeepSeek-V3, arXiv:2412.19437, section 2.2).

Shapes: T rows, H hidden; with sequence parallelism T outside of the layers is this rank's slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from mimo.model.layers import Choices, Linear, RMSNorm
from mimo.model.parallel import TensorAxis
from mimo.model.spec import StageConfig

Run: TypeAlias = Callable[[nn.Module, Tensor], tuple[Tensor, Choices | None]]
"""Runs a layer over rows [T, H]: returns its rows, and which experts were chosen where it has some."""


class MtpModule(nn.Module):
    """Joins each row with the token that was to be predicted of it, and goes through layers of its own.

    Embedding and head are the model's. The two halves are joined in the order of published weights, the token first.

    Attributes:
        axis: over which the columns of the joined rows are split.
    """

    def __init__(self, config: StageConfig, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.token_norm = RMSNorm(config.hidden, eps=config.norm_eps)
        self.hidden_norm = RMSNorm(config.hidden, eps=config.norm_eps)
        self.project = Linear(2 * config.hidden, config.hidden, bias=False)
        self.layers = nn.ModuleDict({str(place): layer for place, layer in enumerate(layers)})
        self.norm = RMSNorm(config.hidden, eps=config.norm_eps)
        self.axis = TensorAxis.single()

    def forward(self, hidden: Tensor, embedded: Tensor, run: Run) -> tuple[Tensor, dict[str, Choices]]:
        """Return what the head reads, normed [T, H], and which experts were chosen, by the layer's path.

        Args:
            hidden: [T, H] normed, what the head read for the token before.
            embedded: [T, H] that token's embedding, 0 where there is none.
            run: runs a layer.
        """
        joined = self.axis.enter(torch.cat([self.token_norm(embedded), self.hidden_norm(hidden)], dim=1))
        span = self.axis.span(joined.shape[1])
        x = self.project(joined[:, span.start : span.stop], leave=self.axis)
        chosen: dict[str, Choices] = {}
        for place, layer in self.layers.items():
            x, choices = run(layer, x)
            if choices is not None:
                chosen[f"layers.{place}"] = choices
        return self.norm(x), chosen
