"""The models of `_big_models` as others write them: of `transformers`, and in plain PyTorch; on padded batches.

Shapes as in `_padded`, and N heads, D their width, T rows of a sample or picture.
"""

from __future__ import annotations

from typing import Any

import torch
from _big_models import PATCH, Size
from _padded import NO_LABEL, Batch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Siglip2VisionConfig, Siglip2VisionModel
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

TABLE = 16
"""Places of a side of the table of positions."""


def projector(size: Size) -> nn.Sequential:
    """Return what brings rows of pictures to the width of the decoder's."""
    width, hidden = size.vision["width"], size.language["hidden"]
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, hidden))


def put(x: Tensor, rows: Tensor, batch: Batch) -> Tensor:
    """Return embeddings with the rows of pictures in their places."""
    return x.masked_scatter(batch.slots.unsqueeze(2), rows.to(x.dtype))


class Transformers(nn.Module):
    """A Llama, behind SigLIP 2's encoder where there are pictures; forward returns the mean loss of a label."""

    def __init__(self, size: Size, *, pictures: bool) -> None:
        super().__init__()
        vision = size.vision
        keys: dict[str, Any] = {**size.llama, "vocab_size": size.language["vocabulary"], "use_cache": False}
        self.language: Any = LlamaForCausalLM(LlamaConfig(**keys))
        self.language.set_attn_implementation("sdpa")
        if pictures:
            self.vision: Any = Siglip2VisionModel(
                Siglip2VisionConfig(
                    hidden_size=vision["width"],
                    intermediate_size=vision["intermediate"],
                    num_hidden_layers=vision["layers"],
                    num_attention_heads=vision["heads"],
                    patch_size=PATCH,
                    num_patches=TABLE**2,
                    vision_use_head=False,
                )
            )
            self.vision.set_attn_implementation("sdpa")
            self.projector = projector(size)

    def forward(self, batch: Batch) -> Tensor:
        """Return the loss."""
        given: dict[str, Any] = {"input_ids": batch.tokens}
        if batch.pictures is not None:
            one = batch.pictures
            seen = self.vision(
                pixel_values=one.patches, pixel_attention_mask=one.seen.long(), spatial_shapes=one.grids
            ).last_hidden_state
            rows = self.projector(seen.flatten(0, 1).index_select(0, one.index))
            given = {"inputs_embeds": put(self.language.get_input_embeddings()(batch.tokens), rows, batch)}
        found: Tensor = self.language(**given, attention_mask=batch.seen.long(), labels=batch.labels).loss
        return found


class Block(nn.Module):
    """Attention and a feed-forward part, each behind a norm: of a decoder, turned and gated, or of an encoder."""

    def __init__(self, width: int, heads: int, intermediate: int, *, decodes: bool) -> None:
        super().__init__()
        self.heads, self.decodes = heads, decodes
        norm = nn.RMSNorm if decodes else nn.LayerNorm
        self.norm1, self.norm2 = norm(width), norm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=not decodes)
        self.output = nn.Linear(width, width, bias=not decodes)
        self.up = nn.Linear(width, (2 if decodes else 1) * intermediate, bias=not decodes)
        self.down = nn.Linear(intermediate, width, bias=not decodes)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> Tensor:
        """Map [B, T, width] to itself."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if turns is not None:
            q, k = (turn(each, *turns) for each in (q, k))
        y = functional.scaled_dot_product_attention(q, k, v.to(q.dtype), attn_mask=mask, is_causal=self.decodes)
        x = x + self.output(y.transpose(1, 2).flatten(2))
        h = self.up(self.norm2(x))
        if self.decodes:
            gate, h = h.chunk(2, 2)
            h = functional.silu(gate) * h
        else:
            h = functional.gelu(h, approximate="tanh")
        found: Tensor = x + self.down(h)
        return found


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions [T, D / 2] to [B, N, T, D]."""
    one, two = x.chunk(2, 3)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], 3).to(x.dtype)


class Plain(nn.Module):
    """The same in plain PyTorch; no row sees padding, which comes last, so that texts need no mask."""

    def __init__(self, size: Size, *, pictures: bool) -> None:
        super().__init__()
        language, vision = size.language, size.vision
        hidden, self.width = language["hidden"], language["hidden"] // language["heads"]
        self.embedding = nn.Embedding(language["vocabulary"], hidden)
        self.layers = nn.ModuleList(
            Block(hidden, language["heads"], language["intermediate"], decodes=True) for _ in range(language["layers"])
        )
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, language["vocabulary"], bias=False)
        if pictures:
            self.patch = nn.Linear(3 * PATCH**2, vision["width"])
            self.table = nn.Parameter(0.02 * torch.randn(1, vision["width"], TABLE, TABLE))
            self.blocks = nn.ModuleList(
                Block(vision["width"], vision["heads"], vision["intermediate"], decodes=False)
                for _ in range(vision["layers"])
            )
            self.last = nn.LayerNorm(vision["width"])
            self.projector = projector(size)

    def forward(self, batch: Batch) -> Tensor:
        """Return the mean loss of a label."""
        x = self.embedding(batch.tokens)
        if batch.pictures is not None:
            x = put(x, self._encode(batch), batch)
        rates = 10000 ** -(torch.arange(0, self.width, 2, device=x.device) / self.width)
        angles = torch.arange(x.shape[1], device=x.device).unsqueeze(1) * rates
        turns = angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, turns, None)
        logits: Tensor = self.head(self.norm(x[:, :-1])).flatten(0, 1)
        return functional.cross_entropy(logits, batch.labels[:, 1:].flatten(), ignore_index=NO_LABEL)

    def _encode(self, batch: Batch) -> Tensor:
        one = batch.pictures
        assert one is not None
        x = self.patch(one.patches) + self._positions(one.grids, one.patches.shape[1])
        mask = one.seen.view(len(x), 1, 1, -1)
        for block in self.blocks:
            x = block(x, None, mask)
        rows: Tensor = self.projector(self.last(x).flatten(0, 1).index_select(0, one.index))
        return rows

    def _positions(self, grids: Tensor, most: int) -> Tensor:
        """Return the table as each picture needs it [N, P, width]."""
        found = [
            functional.interpolate(self.table, (down, across), mode="bilinear", antialias=True)[0].flatten(1).t()
            for down, across in grids.tolist()
        ]
        return torch.stack([functional.pad(one, (0, 0, 0, most - len(one))) for one in found])
