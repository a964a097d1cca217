"""Rows of encoders that are added behind the first layers, beside those that take the places of placeholders.

DeepStack (Meng et al. 2024, arXiv:2406.04334), as in Qwen3-VL. An encoder delivers rows of H · (1 + K) columns, and a
stage hands on, behind its own rows, those that later layers add: [T, H · (1 + M)].
Shapes: T rows, H hidden, K layers that add some, M of them behind a stage.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor


@attrs.frozen(eq=False)
class DeepRows:
    """Rows [T, H] that are to be added behind layers, by the layer; zeros where no encoder's row stands."""

    by_layer: dict[int, Tensor]

    @classmethod
    def split(cls, x: Tensor, *, hidden: int, first: int) -> tuple[Tensor, DeepRows]:
        """Return what the first layer of a stage takes [T, H], and what is added behind it and those after it.

        Args:
            x: [T, H · (1 + M)].
            hidden: H.
            first: index of the layer.
        """
        if x.shape[1] == hidden:
            return x, cls({})
        own, *deep = x.split(hidden, 1)
        return own, cls({first + offset: rows for offset, rows in enumerate(deep)})

    def add(self, layer: int, hidden: Tensor) -> Tensor:
        """Return what a layer returned, [T, H], with its rows added if it has some."""
        rows = self.by_layer.get(layer)
        return hidden if rows is None else hidden + rows

    def join(self, hidden: Tensor, *, stop: int) -> Tensor:
        """Return a stage's rows [T, H], and behind them those that layers from ``stop`` on add."""
        later = [rows for layer, rows in self.by_layer.items() if layer >= stop]
        return torch.cat((hidden, *later), 1) if later else hidden
