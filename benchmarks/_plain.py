"""The models of the benchmarks as one would write them in plain PyTorch: fixed sizes, one batch dimension.

B samples, P patches of an image, S text tokens (the end included), H hidden, N heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as everybody writes it

Through: TypeAlias = Callable[[Tensor], Tensor]


class VisionBlock(nn.Module):
    """Pre-norm attention within an image, then an MLP."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.query, self.key, self.value, self.output = (nn.Linear(config.width, config.width) for _ in range(4))
        self.up = nn.Linear(config.width, config.intermediate)
        self.down = nn.Linear(config.intermediate, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, P, width] to itself."""
        h = self.norm1(x)
        q, k, v = (
            part(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        x = x + self.output(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        y: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + y


class DecoderBlock(nn.Module):
    """RMSNorm, rotary attention, SwiGLU.

    Args:
        config: sizes.
        enter: what rows go through before either part.
        leave: what either part's rows go through before they are added: sums over ranks that share heads and columns.
    """

    def __init__(self, config: Any, enter: Through | None = None, leave: Through | None = None) -> None:
        super().__init__()
        self.enter, self.leave = enter or nn.Identity(), leave or nn.Identity()
        self.heads, self.kv_heads, self.width = config.heads, config.key_value_heads, config.head_width
        self.norm1, self.norm2 = (nn.RMSNorm(config.hidden, eps=config.norm_eps) for _ in range(2))
        self.query = nn.Linear(config.hidden, self.heads * self.width, bias=False)
        self.key, self.value = (nn.Linear(config.hidden, self.kv_heads * self.width, bias=False) for _ in range(2))
        self.output = nn.Linear(self.heads * self.width, config.hidden, bias=False)
        self.gate, self.up = (nn.Linear(config.hidden, config.intermediate, bias=False) for _ in range(2))
        self.down = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map [B, T, H] to itself."""
        h = self.enter(self.norm1(x))
        q = turn(self.query(h).unflatten(-1, (self.heads, self.width)).transpose(1, 2), cos, sin)
        k = turn(self.key(h).unflatten(-1, (self.kv_heads, self.width)).transpose(1, 2), cos, sin)
        v = self.value(h).unflatten(-1, (self.kv_heads, self.width)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_heads != self.heads)
        x = x + self.leave(self.output(y.transpose(1, 2).flatten(2)))
        h = self.enter(self.norm2(x))
        z: Tensor = self.leave(self.down(F.silu(self.gate(h)) * self.up(h)))
        return x + z


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to [B, N, T, D]."""
    one, two = x.chunk(2, -1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


def angles(config: Any, rows: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [T, D / 2] of rotary positions."""
    found = torch.arange(rows)[:, None] * config.rope_theta ** -(
        torch.arange(0, config.head_width, 2) / config.head_width
    )
    return found.cos(), found.sin()


class Tower(nn.Module):
    """A vision encoder and its projector to rows of ``hidden``."""

    def __init__(self, vision: Any, hidden: int) -> None:
        super().__init__()
        self.vision = vision
        self.patch = nn.Linear(vision.channels * vision.patch**2, vision.width)
        self.blocks = nn.ModuleList(VisionBlock(vision) for _ in range(vision.layers))
        self.norm = nn.LayerNorm(vision.width)
        self.projector = nn.Sequential(nn.Linear(vision.width, hidden), nn.GELU(), nn.Linear(hidden, hidden))

    def forward(self, pictures: Tensor) -> Tensor:
        """Return rows [B, P, H] of ``pictures`` [B, C, height, width]."""
        x = self.patch(F.unfold(pictures, self.vision.patch, stride=self.vision.patch).transpose(1, 2))
        x = x + self._positions(pictures)
        for block in self.blocks:
            x = block(x)
        rows: Tensor = self.projector(self.norm(x))
        return rows

    def _positions(self, pictures: Tensor) -> Tensor:
        """Return sines and cosines [P, width] of each patch's row and column."""
        height, width = (side // self.vision.patch for side in pictures.shape[-2:])
        frequencies = 10000 ** -(torch.arange(self.vision.width // 4) / (self.vision.width // 4))
        rows, columns = torch.arange(height)[:, None] * frequencies, torch.arange(width)[:, None] * frequencies
        down = torch.cat([rows.sin(), rows.cos()], -1)[:, None].expand(-1, width, -1)
        across = torch.cat([columns.sin(), columns.cos()], -1)[None].expand(height, -1, -1)
        return torch.cat([down, across], -1).flatten(0, 1)


class Model(nn.Module):
    """One image, then text."""

    def __init__(self, vision: Any, language: Any) -> None:
        super().__init__()
        self.language = language
        self.tower = Tower(vision, language.hidden)
        self.embedding = nn.Embedding(language.vocabulary, language.hidden)
        self.layers = nn.ModuleList(DecoderBlock(language) for _ in range(language.layers))
        self.final = nn.RMSNorm(language.hidden, eps=language.norm_eps)
        self.head = nn.Linear(language.hidden, language.vocabulary, bias=False)

    def forward(self, pictures: Tensor, tokens: Tensor) -> Tensor:
        """Return the mean loss of text ``tokens`` [B, S] behind ``pictures`` [B, C, height, width]."""
        rows = self.tower(pictures)
        x = torch.cat([rows, self.embedding(tokens)], 1)
        cos, sin = angles(self.language, x.shape[1])
        for layer in self.layers:
            x = layer(x, cos, sin)
        hidden = self.final(x[:, rows.shape[1] - 1 : -1])
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())
