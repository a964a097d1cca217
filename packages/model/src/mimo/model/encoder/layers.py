"""The layer that encoders share: pre-norm, attention within each item, feed-forward; as in Dosovitskiy et al. 2020.

It reads as if it ran on one rank: `split_encoder` says how it is split, by handing a `TensorAxis` to the parts that
enter and leave shared work, and only `attend` looks beyond this rank's rows.
Shapes: T rows of this rank's slice, padding included, W width, N heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional

from mimo.model.attention import Segments, attend
from mimo.model.draws import DrawKeys, Dropout, DropPath
from mimo.model.encoder.cross_attention import CrossAttention
from mimo.model.encoder.packed_rows import PackedRows
from mimo.model.layers import LayerNorm, Linear
from mimo.model.parallel import Split, TensorAxis
from mimo.model.spec import Activation, Side, Stage


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Return an activation of ``x``, under its usual name; ``quick_gelu`` is CLIP's, ``squared_relu`` Primer's."""
    match activation:
        case "gelu":
            return functional.gelu(x)
        case "gelu_tanh":
            return functional.gelu(x, approximate="tanh")
        case "quick_gelu":
            return x * torch.sigmoid(1.702 * x)
        case "silu":
            return functional.silu(x)
        case "relu":
            return functional.relu(x)
        case "squared_relu":
            return functional.relu(x).square()


class EncoderAttention(nn.Module):
    """Attention of every row to all rows of its item.

    Args:
        width: W, a multiple of ``heads``.
        heads: N.
        key_bias: whether keys have a bias; no output depends on it, since a softmax cancels it.

    Attributes:
        axis: over which heads are split.
    """

    def __init__(self, width: int, heads: int, *, key_bias: bool = False) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query = Linear(width, width)
        self.key = Linear(width, width, bias=key_bias)
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


class EncoderMlp(nn.Module):
    """Two products with an activation between.

    Args:
        inputs: width of what it reads.
        middle: width between the products.
        outputs: width of what it makes.
        activation: between the products.
        bias: whether they have biases.
        dropout: the rate at which features are dropped behind the activation in training.

    Attributes:
        axis: over which the middle is split.
    """

    def __init__(
        self,
        inputs: int,
        middle: int,
        outputs: int,
        *,
        activation: Activation = "gelu",
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.up = Linear(inputs, middle, bias=bias)
        self.down = Linear(middle, outputs, bias=bias)
        self.activation: Activation = activation
        self.drop = Dropout(dropout, reader="down")
        self.axis = TensorAxis.single()

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, outputs] of ``x`` [T, inputs]."""
        return self.finish(self.up(self.axis.enter(x)))

    def finish(self, middle: Tensor) -> Tensor:
        """Return [T, outputs] of the first product: cheap to compute again, beside what it keeps."""
        return cast("Tensor", self.down(self.drop(activate(middle, self.activation)), leave=self.axis))


class EncoderLayer(nn.Module):
    """Attention, then feed-forward, each on normed rows and added to them.

    Args:
        width: W, a multiple of ``heads``.
        heads: N.
        intermediate: width inside the feed-forward part.
        eps: added to variances before the root.
        activation: inside the feed-forward part.
        key_bias: whether keys have a bias.
        dropout: the rate at which features of what either part adds are dropped in training.
        activation_dropout: likewise behind the activation.
        drop_path: the rate at which either part of it is left out for an item in training.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        intermediate: int,
        *,
        eps: float,
        activation: Activation = "gelu",
        key_bias: bool = False,
        dropout: float = 0.0,
        activation_dropout: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(width, eps=eps)
        self.attention = EncoderAttention(width, heads, key_bias=key_bias)
        self.mlp_norm = LayerNorm(width, eps=eps)
        self.mlp = EncoderMlp(width, intermediate, width, activation=activation, dropout=activation_dropout)
        self.attention_dropout = Dropout(dropout)
        self.mlp_dropout = Dropout(dropout)
        self.attention_drop = DropPath(drop_path)
        self.mlp_drop = DropPath(drop_path)

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        """Return [T, W] of ``x`` [T, W]."""
        attended = self.attention_dropout(self.attention(self.attention_norm(x), segments))
        x = x + self.attention_drop(attended)
        return cast("Tensor", x + self.mlp_drop(self.mlp_dropout(self.mlp(self.mlp_norm(x)))))


class PackedEncoder(nn.Module):
    """What encoders of these layers have in common: whole, or one pipeline stage after `cut`.

    Args:
        layers: in the order in which data passes them.

    Attributes:
        layers: those of this stage, by global index.
        rows: which of the packed rows of all items this rank holds.
        stage: which part of the whole it is.
        draw_keys: by which its parts draw at random.
        first_only: names of attributes that the first stage alone keeps, modules or parameters.
        last_only: likewise the last stage.
        behind_seam: those of them that are the projector's.
    """

    first_only: Sequence[str] = ()
    last_only: Sequence[str] = ()
    behind_seam: Sequence[str] = ("projector",)

    def __init__(self, layers: Iterable[EncoderLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): layer for index, layer in enumerate(layers)})
        self.rows = PackedRows()
        self.stage = Stage()
        self.draw_keys = DrawKeys()

    def cut(self, stage: Stage) -> None:
        """Keep what ``stage`` runs of the whole: its layers, and what only the first and the last stage need."""
        self.stage = stage
        for index in set(range(len(self.layers))) - set(stage.layers(len(self.layers))):
            del self.layers[str(index)]
        for name in (*(() if stage.is_first else self.first_only), *(() if stage.is_last else self.last_only)):
            delattr(self, name)

    def divide(self, side: Side) -> None:
        """Keep of the last stage its tower, or its projector alone."""
        assert self.stage.is_last, self.stage
        count, gone = self.stage.count, self.behind_seam
        if side == "projector":
            before = (*(self.first_only if self.stage.is_first else ()), *self.last_only)
            gone = [name for name in before if name not in self.behind_seam]
            self.layers = nn.ModuleDict()
        for name in gone:
            delattr(self, name)
        self.stage = Stage(count - (side == "tower"), count + 1, seam=True)

    def pass_layers(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return this rank's rows [t, W] after the layers of this stage.

        Args:
            hidden: before them, [t, W].
            lengths: rows of each item, those of all ranks; where an item has several parts that don't see each other,
                of each part (see `DrawKeys.parts`).
        """
        if self.stage.is_projector:
            return hidden
        segments, keys = self.rows.segments(lengths, device=hidden.device), self.draw_keys
        with keys.at(keys.packed(lengths, self.rows.entered(sum(lengths)), device=hidden.device)):
            for layer in self.layers.values():
                hidden = layer(hidden, segments)
        return hidden


def split_encoder(module: nn.Module, axis: TensorAxis) -> dict[str, Split]:
    """Hand ``axis`` to an encoder and its blocks, and return how its parameters are split: see `split_blocks`."""
    assert isinstance(module, PackedEncoder)
    module.rows = attrs.evolve(module.rows, axis=axis)
    return split_blocks(module, axis)


def split_blocks(module: nn.Module, axis: TensorAxis) -> dict[str, Split]:
    """Hand ``axis`` to the blocks of a module that are named here, and return how its parameters are split.

    Heads and the middle of each `EncoderMlp` are cut, the rest is copied. What is copied has equal gradients where
    every rank holds all rows; where rows are split too (sequence parallelism, Korthikanti et al. 2022,
    arXiv:2205.05198) each rank's gradient is a part of the sum.
    """
    splits = {path: Split(summed=axis.splits_rows) for path, _ in module.named_parameters()}
    for path, part in module.named_modules():
        if isinstance(part, EncoderAttention | CrossAttention):
            part.axis = axis
            columns = {"query": part.query, "key": part.key, "value": part.value}
            splits |= _products(path, columns=columns, rows=("output",))
        elif isinstance(part, EncoderMlp):
            part.axis = axis
            splits |= _products(path, columns={"up": part.up}, rows=("down",))
    return splits


def _products(path: str, *, columns: Mapping[str, Linear], rows: tuple[str, ...]) -> Iterator[tuple[str, Split]]:
    """Outputs of column-parallel products are cut, with their biases; inputs of row-parallel ones."""
    for name, linear in columns.items():
        yield f"{path}.{name}.weight", Split(0)
        if linear.bias is not None:
            yield f"{path}.{name}.bias", Split(0)
    for name in rows:
        yield f"{path}.{name}.weight", Split(1)
