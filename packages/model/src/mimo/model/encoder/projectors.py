"""From an encoder's rows to rows of the language model: class tokens dropped, neighbours joined, width changed.

Which input rows each row is made of follows from the grids alone, so that it is the same wherever slices are cut.
Shapes: T rows of all grids, R rows that they become, K rows joined to one, W width of the encoder, I width K·W of what
is projected, H width of the language model's rows, Q queries of a resampler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from mimo.model.attention import Segments
from mimo.model.draws import DrawKeys, Drawn
from mimo.model.encoder.cross_attention import CrossAttention
from mimo.model.encoder.layers import EncoderMlp
from mimo.model.encoder.packed_rows import PackedRows
from mimo.model.layers import Embedding, LayerNorm, Linear, RMSNorm
from mimo.model.spec import RESAMPLER_RATIO, PatchGrid, ProjectorConfig

_EPS = 1e-5


class Projector(nn.Module):
    """The last part of an encoder.

    Args:
        config: its settings.
        width: W.
        hidden: H.

    Attributes:
        draw_keys: by which its linears draw at random.
    """

    def __init__(self, config: ProjectorConfig, width: int, hidden: int) -> None:
        super().__init__()
        self.config = config
        self.draw_keys = DrawKeys()
        inputs = width * config.shuffle**2
        if config.norm != "none":
            self.norm = (LayerNorm if config.norm == "layer" else RMSNorm)(inputs, eps=_EPS)
        if config.kind == "linear":
            self.linear = Linear(inputs, hidden, bias=config.bias)
        elif config.kind == "mlp":
            middle = config.hidden or hidden
            self.mlp = EncoderMlp(inputs, middle, hidden, activation=config.activation, bias=config.bias)
        else:
            self.resampler = Resampler(config, inputs, hidden)

    def forward(
        self, x: Tensor, grids: Sequence[PatchGrid], rows: PackedRows, *, prefix: int = 0, class_tokens: int = 0
    ) -> Tensor:
        """Return this rank's slice of the rows [R, H]; `mimo.model.projected_rows` of each grid.

        Args:
            x: this rank's slice of the encoder's rows [T, W], those of each grid after its class tokens.
            grids: of all items.
            rows: how the rows are cut.
            prefix: class tokens before each grid.
            class_tokens: of these, how many stay, the first ones; 0 where rows are joined.
        """
        shuffle = self.config.shuffle
        if prefix != class_tokens or shuffle > 1:
            total = sum(prefix + down * across for down, across in grids)
            x = rows.take(x, joined(grids, shuffle=shuffle, prefix=prefix, class_tokens=class_tokens), total=total)
        if self.config.norm != "none":
            x = self.norm(x)
        lengths, keys = [class_tokens + down * across // shuffle**2 for down, across in grids], self.draw_keys
        if self.config.kind == "resampler":
            return cast("Tensor", self.resampler(x, lengths, rows))
        project = self.linear if self.config.kind == "linear" else self.mlp
        with keys.at(keys.packed(lengths, rows.entered(sum(lengths)), device=x.device)):
            return cast("Tensor", project(x))


def joined(grids: Sequence[PatchGrid], *, shuffle: int, prefix: int, class_tokens: int) -> Tensor:
    """Return which of the rows of all grids each row is made of, [R, K].

    Args:
        grids: whose sides ``shuffle`` divides.
        shuffle: side of the squares that become one row; of each square row by row.
        prefix: class tokens before each grid.
        class_tokens: of these, how many stay.
    """
    assert shuffle == 1 or not class_tokens, "a class token has no neighbours"
    own = {grid: _joined(grid, shuffle, prefix, class_tokens) for grid in set(grids)}
    pieces, start = [torch.empty(0, shuffle**2, dtype=torch.long)], 0
    for grid in grids:
        pieces.append(own[grid] + start)
        start += prefix + grid[0] * grid[1]
    return torch.cat(pieces)


def _joined(grid: PatchGrid, shuffle: int, prefix: int, class_tokens: int) -> Tensor:
    down, across = grid
    assert down % shuffle == across % shuffle == 0, (grid, shuffle)
    places = torch.arange(prefix, prefix + down * across).view(down // shuffle, shuffle, across // shuffle, shuffle)
    return torch.cat(
        (torch.arange(class_tokens).view(-1, 1).expand(-1, shuffle**2), places.transpose(1, 2).reshape(-1, shuffle**2))
    )


class Resampler(nn.Module):
    """Learned queries that attend to the rows of each grid, and become its rows (Alayrac et al. 2022, section 3.1).

    Unlike there, queries attend to the rows alone and not to one another, and what says where a row lies is the
    encoder's. The queries of all grids are packed rows like any others: each rank goes on with its slice of them.

    Args:
        config: of the projector.
        inputs: I.
        hidden: H.

    Attributes:
        draw_keys: by which its linears draw at random.
    """

    def __init__(self, config: ProjectorConfig, inputs: int, hidden: int) -> None:
        super().__init__()
        self.queries = Embedding(config.queries, config.hidden)
        self.layers = nn.ModuleDict({str(index): ResamplerLayer(config, inputs) for index in range(config.layers)})
        self.norm = LayerNorm(config.hidden, eps=_EPS)
        self.output = Linear(config.hidden, hidden)
        self.draw_keys = DrawKeys()

    def forward(self, x: Tensor, lengths: Sequence[int], rows: PackedRows) -> Tensor:
        """Return this rank's slice of the rows of all grids [grids·Q, H].

        Args:
            x: this rank's slice of what is attended to [R, I].
            lengths: rows of each grid, those of all ranks.
            rows: how rows are cut.
        """
        total, keys = len(lengths) * self.queries.count, self.draw_keys
        mine = rows.held(total)
        x_queries = self.queries(torch.arange(mine.start, mine.stop, device=x.device) % self.queries.count)
        segments = rows.crossed(lengths, queries=self.queries.count, device=x.device)
        seen = keys.packed(lengths, rows.entered(sum(lengths)), device=x.device)
        queries = keys.packed([self.queries.count] * len(lengths), rows.entered(total), device=x.device)
        with keys.at(queries):
            for layer in self.layers.values():
                x_queries = layer(x_queries, x, segments, rows, seen)
            return cast("Tensor", self.output(self.norm(x_queries)))


class ResamplerLayer(nn.Module):
    """Attention of the queries to what they see, then feed-forward, each on normed queries and added to them."""

    def __init__(self, config: ProjectorConfig, inputs: int) -> None:
        super().__init__()
        width = config.hidden
        self.attention_norm = LayerNorm(width, eps=_EPS)
        self.attention = CrossAttention(width, inputs, config.heads)
        self.mlp_norm = LayerNorm(width, eps=_EPS)
        self.mlp = EncoderMlp(width, RESAMPLER_RATIO * width, width, activation=config.activation)

    def forward(self, x_queries: Tensor, seen: Tensor, segments: Segments, rows: PackedRows, drawn: Drawn) -> Tensor:
        """Return [T, W] of ``x_queries`` [T, W]; for the rest see `CrossAttention`."""
        x_queries = x_queries + self.attention(self.attention_norm(x_queries), seen, segments, rows, drawn)
        return cast("Tensor", x_queries + self.mlp(self.mlp_norm(x_queries)))
