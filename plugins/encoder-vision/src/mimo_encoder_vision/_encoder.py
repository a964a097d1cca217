"""A vision transformer over packed patches of images: pre-norm, attention within each image or tile.

After Dosovitskiy et al. 2020, arXiv:2010.11929. The families differ in what `VisionConfig`'s classes say: positions,
class token, biases, norms.
Shapes: T rows of this rank's slice (class tokens and patches), padding included, W encoder width, H the language
model's width, C channels, P patch side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from mimo.model.runtime import (
    Embedding,
    EncoderLayer,
    LayerNorm,
    Linear,
    PackedEncoder,
    Projector,
    Segments,
    packed_patches,
    touched_by,
)
from mimo_encoder_vision._config import LearnedConfig, VisionConfig
from mimo_encoder_vision._grids import grids_of
from mimo_encoder_vision._positions import each_once, resized_positions, sine_positions


class IdleLayer(EncoderLayer):
    """A layer beyond the one whose rows are handed on: there for its weights, which nothing trains."""

    def forward(self, x: Tensor, _segments: Segments) -> Tensor:
        """Return ``x``."""
        return x.view_as(x)


class VisionTransformer(PackedEncoder):
    """The whole encoder, or after `cut` one pipeline stage of it."""

    last_only = ("norm", "projector")

    def __init__(self, config: VisionConfig, hidden: int) -> None:
        super().__init__(_layer(config, index) for index in range(config.layers))
        self.config = config
        self.patch = Linear(config.channels * config.patch**2, config.width, bias=config.patch_bias)
        if config.class_tokens:
            self.class_tokens = Embedding(config.class_tokens, config.width)
        if isinstance(config, LearnedConfig):
            self.positions = Embedding(config.class_tokens + config.places**2, config.width)
        if config.pre_norm:
            self.pre_norm = LayerNorm(config.width, eps=config.eps)
        self.norm = LayerNorm(config.width, eps=config.eps)
        self.projector = Projector(config.projector, config.width, hidden)
        self.norm.requires_grad_(requires_grad=config.final_norm)
        self.first_only = [name for name in ("patch", "class_tokens", "positions", "pre_norm") if hasattr(self, name)]

    def forward(
        self,
        items: Sequence[Mapping[str, Tensor]],
        sizes: Sequence[tuple[int, ...]] | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Return this rank's rows of all images in order: [T, H] from the last stage, [T, W] from the others.

        Args:
            items: prepared images, on the first stage.
            sizes: their header sizes; a later stage has nothing else to separate the images.
            hidden: rows [T, W] of the stage before; None on the first.
        """
        if hidden is None:
            own = [[self._grid(tile) for tile in item["pixels"].unbind(0)] for item in items]
        else:
            assert sizes is not None, "a later stage needs the sizes of the images"
            own = [grids_of(self.config, size) for size in sizes]
        with self.draw_keys.at(self.draw_keys.parts([len(grids) for grids in own])):
            return self._encode(items, [grid for grids in own for grid in grids], hidden)

    def _grid(self, tile: Tensor) -> tuple[int, int]:
        return tile.shape[1] // self.config.patch, tile.shape[2] // self.config.patch

    def _encode(
        self, items: Sequence[Mapping[str, Tensor]], grids: Sequence[tuple[int, int]], hidden: Tensor | None
    ) -> Tensor:
        config = self.config
        lengths = [config.class_tokens + down * across for down, across in grids]
        if hidden is None:
            hidden = self._embed([tile for item in items for tile in item["pixels"].unbind(0)], grids, lengths)
        hidden = self.pass_layers(hidden, lengths)
        if config.final_norm and self.stage.ends_tower:
            hidden = self.norm(hidden)
        if not self.stage.is_last:
            return hidden
        rows = self.projector(hidden, grids, self.rows, prefix=config.class_tokens, class_tokens=config.class_rows)
        return cast("Tensor", rows)

    def _embed(self, tiles: Sequence[Tensor], grids: Sequence[tuple[int, int]], lengths: Sequence[int]) -> Tensor:
        """Return embedded patches and class tokens with their positions added, [T, W]."""
        config, weight = self.config, self.patch.weight
        mine, keys = self.rows.held(sum(lengths)), self.draw_keys
        touched, here = touched_by(mine, lengths)
        # A class token is a patch of zeros, which no bias follows.
        assert not (config.class_tokens and config.patch_bias)
        patches = packed_patches(
            tiles[touched],
            patch=config.patch,
            like=weight,
            width=weight.shape[1],
            zeros=config.class_tokens,
            channels_last=True,
        )[here]
        with keys.at(keys.packed(lengths, mine[: len(patches)], device=weight.device)):
            embedded = self.patch(patches)
        embedded = embedded + self._positions(grids[touched], like=embedded)[here]
        if config.pre_norm:
            embedded = self.pre_norm(embedded)
        return self.rows.pad(embedded, total=sum(lengths))

    def _positions(self, grids: Sequence[tuple[int, int]], *, like: Tensor) -> Tensor:
        """Return what is added to the rows of these grids, class tokens themselves included, [T, W]."""
        config = self.config
        if not isinstance(config, LearnedConfig):
            own = {grid: sine_positions(grid, width=config.width, like=like) for grid in each_once(grids)}
            return torch.cat([own[grid] for grid in grids]) if grids else like[:0]
        weight = self.positions.weight
        lead, table = weight[: config.class_tokens], weight[config.class_tokens :]
        if config.class_tokens:
            lead = lead + self.class_tokens.weight
        antialias = config.resize_positions == "bilinear"
        own = {grid: resized_positions(table, grid, antialias=antialias) for grid in each_once(grids)}
        # Nothing of each comes first, so that a rank without an image has gradients too.
        return torch.cat([lead[:0], table[:0], *(piece for grid in grids for piece in (lead, own[grid]))])


def _layer(config: VisionConfig, index: int) -> EncoderLayer:
    idle = index >= config.depth
    layer = (IdleLayer if idle else EncoderLayer)(
        config.width,
        config.heads,
        config.intermediate,
        eps=config.eps,
        activation=config.activation,
        key_bias=config.key_bias,
        drop_path=0.0 if idle else config.drop_path * index / max(config.depth - 1, 1),
    )
    return layer.requires_grad_(requires_grad=not idle)
