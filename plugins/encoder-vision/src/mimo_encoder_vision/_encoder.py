"""A vision transformer over packed patches of images of any size: pre-norm, attention within each image.

After Dosovitskiy et al. 2020, arXiv:2010.11929, without class token; keys have no bias, since a softmax cancels it.
It reads as if it ran on one rank: `_tensor_plan.py` says how it is split, by handing a `TensorAxis` to the parts that
enter and leave shared work. Under sequence and context parallelism a rank holds a slice of the packed rows, and may
begin and end in the middle of an image; only `attend` looks beyond it.
Shapes: T rows (patches) of this rank's slice, padding included, W encoder width, H the language model's width, N heads,
D head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from torch import Tensor, nn
from torch.nn import functional

from mimo.model import Stage
from mimo.model.runtime import ContextAxis, LayerNorm, Linear, Segments, TensorAxis, attend, local
from mimo_encoder_vision._images import sine_positions, to_patches, touched_by
from mimo_encoder_vision._plugin import VitConfig, grid_of

_EPS = 1e-6


class Attention(nn.Module):
    """Attention of every patch to all patches of its image.

    Attributes:
        axis: over which heads are split.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query = Linear(width, width)
        self.key = Linear(width, width, bias=False)
        self.value = Linear(width, width)
        self.output = Linear(width, width)
        self.axis = TensorAxis.single()

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        """Return [T, W] of ``x`` [T, W]."""
        x = self.axis.enter(x)
        query, key, value = (
            project(x).unflatten(1, (-1, self.head_width)) for project in (self.query, self.key, self.value)
        )
        return self.finish(query, key, value, segments)

    def finish(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
        """Return [T, W] of the three products: cheap to compute again, beside what it keeps."""
        attended = attend(query, key, value, segments)  # [T, N, D]
        return cast("Tensor", self.output(attended.flatten(1), leave=self.axis))


class Mlp(nn.Module):
    """Two layers with GELU between.

    Attributes:
        axis: over which the middle is split.
    """

    def __init__(self, inputs: int, middle: int, outputs: int) -> None:
        super().__init__()
        self.up = Linear(inputs, middle)
        self.down = Linear(middle, outputs)
        self.axis = TensorAxis.single()

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, outputs] of ``x`` [T, inputs]."""
        return self.finish(self.up(self.axis.enter(x)))

    def finish(self, middle: Tensor) -> Tensor:
        """Return [T, outputs] of the first product: cheap to compute again, beside what it keeps."""
        return cast("Tensor", self.down(functional.gelu(middle), leave=self.axis))


class Layer(nn.Module):
    """Attention, then feed-forward, each on normed rows and added to them."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(config.width, eps=_EPS)
        self.attention = Attention(config.width, config.heads)
        self.mlp_norm = LayerNorm(config.width, eps=_EPS)
        self.mlp = Mlp(config.width, config.intermediate, config.width)

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        """Return [T, W] of ``x`` [T, W]."""
        x = x + self.attention(self.attention_norm(x), segments)
        return cast("Tensor", x + self.mlp(self.mlp_norm(x)))


class VisionTransformer(nn.Module):
    """The whole encoder, or after `cut` one pipeline stage of it.

    Attributes:
        axis: over which, with sequence parallelism, the rows of a context rank are split.
        context: over which the rows of all images are split.
    """

    def __init__(self, config: VitConfig, hidden: int) -> None:
        super().__init__()
        self.config = config
        self.stage = Stage()
        self.patch = Linear(config.channels * config.patch**2, config.width)
        self.layers = nn.ModuleDict({str(index): Layer(config) for index in range(config.layers)})
        self.norm = LayerNorm(config.width, eps=_EPS)
        self.projector = Mlp(config.width, config.projector or hidden, hidden)
        self.axis = TensorAxis.single()
        self.context = ContextAxis.single()

    def cut(self, stage: Stage) -> VisionTransformer:
        """Keep what ``stage`` runs: patches on the first, final norm and projector on the last. Returns itself."""
        self.stage = stage
        kept = stage.layers(self.config.layers)
        for index in set(range(self.config.layers)) - set(kept):
            del self.layers[str(index)]
        if not stage.is_first:
            del self.patch
        if not stage.is_last:
            del self.norm, self.projector
        return self

    def forward(
        self,
        items: Sequence[Mapping[str, Tensor]],
        sizes: Sequence[tuple[int, ...]] | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Return this rank's rows of all images in order: [T, H] from the last stage, [T, W] from the others.

        Args:
            items: prepared images, on the first stage.
            sizes: their header sizes; a later stage has nothing else to tell the images apart.
            hidden: rows [T, W] of the stage before; None on the first.
        """
        patch = self.config.patch
        if hidden is None:
            grids = [(item["pixels"].shape[1] // patch, item["pixels"].shape[2] // patch) for item in items]
        else:
            assert sizes is not None, "a later stage needs the sizes of the images"
            grids = [grid_of(self.config, size) for size in sizes]
        lengths = [down * across for down, across in grids]
        rows = self._rows(sum(lengths))
        if hidden is None:
            hidden = self._embed([item["pixels"] for item in items], grids, rows)
        # Under sequence parallelism `Attention` enters with the rows of all tensor ranks.
        entered = len(rows) * (self.axis.size if self.axis.splits_rows else 1)
        segments = Segments.sliced(lengths, causal=False, rows=entered, device=hidden.device, context=self.context)
        for layer in self.layers.values():
            hidden = layer(hidden, segments)
        return cast("Tensor", self.projector(self.norm(hidden)) if self.stage.is_last else hidden)

    def _rows(self, total: int) -> range:
        """Return which of the packed rows are this rank's: equal slices, the last ones reaching beyond the end."""
        slices, index = self.context.size, self.context.rank
        if self.axis.splits_rows:
            slices, index = slices * self.axis.size, index * self.axis.size + self.axis.rank
        each = -(-total // slices)
        return range(index * each, (index + 1) * each)

    def _embed(self, images: Sequence[Tensor], grids: Sequence[tuple[int, int]], rows: range) -> Tensor:
        """Return embedded patches with their positions added, [T, W]: those of ``rows``, zeros beyond the end."""
        weight = local(self.patch.weight)
        touched, here = touched_by(rows, [down * across for down, across in grids])
        patches = to_patches(images[touched], patch=self.config.patch, like=weight, width=weight.shape[1])[here]
        embedded = self.patch(patches)
        embedded = embedded + sine_positions(grids[touched], width=self.config.width, like=embedded)[here]
        padding = len(rows) - len(embedded)
        return functional.pad(embedded, (0, 0, 0, padding)) if padding else cast("Tensor", embedded)
