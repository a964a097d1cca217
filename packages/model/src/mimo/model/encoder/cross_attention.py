"""Attention of some rows of each item to all rows of the same item, where both lie on several ranks.

Shapes: T rows that ask, S rows that are seen, both of this rank's slices with their padding; W width, I columns of what
is seen, N heads, D head width.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from mimo.model.attention import Segments, attend
from mimo.model.draws import DrawKeys, Drawn
from mimo.model.encoder.packed_rows import PackedRows
from mimo.model.layers import Linear
from mimo.model.parallel import TensorAxis


class CrossAttention(nn.Module):
    """Attention of as many rows for each item to the rows of that item.

    Args:
        width: W, a multiple of ``heads``.
        inputs: I.
        heads: N.

    Attributes:
        axis: over which heads are split.
        draw_keys: by which its linears draw at random.
    """

    def __init__(self, width: int, inputs: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query = Linear(width, width)
        self.key = Linear(inputs, width, bias=False)
        self.value = Linear(inputs, width)
        self.output = Linear(width, width)
        self.axis = TensorAxis.single()
        self.draw_keys = DrawKeys()

    def forward(self, x: Tensor, seen: Tensor, segments: Segments, rows: PackedRows, drawn: Drawn) -> Tensor:
        """Return [T, W] of ``x`` [T, W]; padding at the end gets zeros before the last product.

        With several context ranks each projects the rows that it holds, and every one must call it.

        Args:
            x: this rank's slice of the rows that ask.
            seen: this rank's slice of the rows that are seen [S, I].
            segments: `PackedRows.crossed`.
            rows: how both are cut.
            drawn: keys of the rows that are seen; those of now are of the others.
        """
        x, seen = self.axis.enter(x), self.axis.enter(seen)
        query = self.query(x).unflatten(1, (-1, self.head_width))  # [T, N, D], under sequence parallelism more rows
        with self.draw_keys.at(drawn):
            held = torch.cat((self.key(seen), self.value(seen)), 1)
        shared = rows.context.share(held, [len(held)] * rows.context.size)
        key, value = shared.unflatten(1, (2, -1, self.head_width)).unbind(1)
        attended = attend(query, key, value, segments)
        return cast("Tensor", self.output(attended.flatten(1), leave=self.axis))
