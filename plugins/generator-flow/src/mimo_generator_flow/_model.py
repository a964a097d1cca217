"""Flow matching over the patches of pictures (Lipman et al. 2022, arXiv:2210.02747; Liu et al. 2022, arXiv:2209.03003).

A picture is a point on a straight way from noise, at time 0, to data, at time 1; the network says with which velocity
it moves there, data less noise. It is a transformer over the picture's rows of the language model and its patches, one
after the other; time enters by modulation of the norms, which are the identity's at first (adaLN-zero of DiT, Peebles
and Xie 2022, arXiv:2212.09748, section 3.2).
Shapes: N pictures, L patches of each, E numbers of a patch, R rows of the language model, H their width, c rows that
pictures are made from, T rows of the sequence, W width inside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from mimo.model.runtime import (
    DrawKeys,
    Embedding,
    EncoderAttention,
    EncoderMlp,
    LayerNorm,
    Linear,
    Segments,
    packed_patches,
    to_device,
)
from mimo_generator_flow._config import FlowConfig
from mimo_generator_flow._draws import draw_dropped, draw_noise, draw_times
from mimo_generator_flow._packing import Packing

_TIME_SCALE = 1000.0
"""By what times are multiplied before their sines are taken, so that the fastest of these turn often."""
_PERIOD = 10000.0
_LAYER_PARTS = 6
_OUTPUT_PARTS = 2


class ZeroLinear(Linear):
    """A product that is 0 at first."""

    def reset_parameters(self) -> None:
        """Clear weight and bias."""
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class FlowLayer(nn.Module):
    """Attention, then feed-forward, each on rows that are normed and modulated, and added to them through a gate.

    Attributes:
        modulation: of each picture's time, shift, scale and gate of both parts.
        draw_keys: by which adaptation of its linears draws at random.
    """

    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        width = config.hidden
        self.eps = config.norm_eps
        self.modulation = ZeroLinear(width, _LAYER_PARTS * width)
        self.attention = EncoderAttention(width, config.heads)
        self.mlp = EncoderMlp(width, config.intermediate, width, activation=config.activation)
        self.draw_keys = DrawKeys()

    def forward(self, x: Tensor, moments: Tensor, owners: Tensor, segments: Segments, drawn: Tensor | None) -> Tensor:
        """Return [T, W] of ``x`` [T, W].

        Args:
            x: rows of all pictures.
            moments: [N, W] what the pictures' times have become.
            owners: [T] which picture each row is of.
            segments: of the pictures.
            drawn: [N, 2] keys of the pictures, one row each; None where nothing is drawn.
        """
        shift, scale, gate, *of_mlp = rows_at(owners, self._modulation(moments, drawn)).chunk(_LAYER_PARTS, 1)
        x = x + gate * self.attention(modulated(x, shift, scale, self.eps), segments)
        shift, scale, gate = of_mlp
        return cast("Tensor", x + gate * self.mlp(modulated(x, shift, scale, self.eps)))

    def _modulation(self, moments: Tensor, drawn: Tensor | None) -> Tensor:
        """Return [N, 6·W] of ``moments``; made inside of the layer, since its parameters may be here only then."""
        keys, rows = self.draw_keys, self.draw_keys.rows
        keys.rows = drawn  # and no context that sets all keys, which no compiler can follow
        found = self.modulation(moments)
        keys.rows = rows
        return cast("Tensor", found)


class Connector(nn.Module):
    """From rows of the language model to those that patches attend to.

    Attributes:
        null: the learned row of a picture that is made from none.
    """

    def __init__(self, hidden: int, width: int, *, eps: float) -> None:
        super().__init__()
        self.norm = LayerNorm(hidden, eps=eps)
        self.project = Linear(hidden, width)
        self.null = Embedding(1, width)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the learned row and those of ``rows`` [c, H], [1 + c, W]."""
        return torch.cat((self.null.weight, self.project(self.norm(rows))))


class FlowTransformer(nn.Module):
    """The whole generator.

    Attributes:
        draw_keys: by which adaptation of its linears draws at random, where it does.
    """

    def __init__(self, config: FlowConfig, hidden: int) -> None:
        super().__init__()
        width = config.hidden
        self.config = config
        self.connector = Connector(hidden, width, eps=config.norm_eps)
        self.patch = Linear(config.patch_width, width)
        self.time = EncoderMlp(width, width, width, activation="silu")
        self.layers = nn.ModuleList(FlowLayer(config) for _ in range(config.layers))
        self.modulation = ZeroLinear(width, _OUTPUT_PARTS * width)
        self.output = ZeroLinear(width, config.patch_width)
        self.draw_keys = DrawKeys()

    def forward(
        self, items: Sequence[Mapping[str, Tensor]], rows: Tensor, spans: Sequence[tuple[int, int]], keys: Tensor
    ) -> Tensor:
        """Return for each patch of each picture how far the velocity is off, its mean square, fp32, [N·L].

        Where no gradient is asked for, as in evaluation, no picture does without its rows.

        Args:
            items: prepared pictures.
            rows: of the language model [R, H], in the type of the parameters.
            spans: which rows each picture is made from; they may overlap or be empty.
            keys: [N] on the CPU, by which all is drawn.
        """
        config, device = self.config, rows.device
        data = packed_patches(
            (item["pixels"] for item in items),
            patch=config.patch,
            like=rows.new_empty(0, dtype=torch.float32),
            width=config.patch_width,
            channels_last=True,
        )
        noise, times = draw_noise(config, keys, device=device), draw_times(config, keys, device=device)
        if torch.is_grad_enabled():
            dropped = draw_dropped(config, keys)
            spans = [(0, 0) if drops else span for span, drops in zip(spans, dropped, strict=True)]
        packing = self.pack(spans, device=device)
        moments = times.repeat_interleave(config.targets, 0, output_size=len(data))
        way = data - noise
        velocity = self.velocity(noise + moments * way, times, self.connected(rows, packing), packing)
        return (velocity - way).square().mean(1)

    def pack(self, spans: Sequence[tuple[int, int]], *, device: torch.device) -> Packing:
        """Return how pictures lie that are made from these rows."""
        return Packing.of(spans, patches=self.config.targets, device=device)

    def connected(self, rows: Tensor, packing: Packing) -> Tensor:
        """Return the learned row and all that pictures are made from, [1 + c, W] of ``rows`` [R, H]."""
        keys = self.draw_keys
        with keys.at(keys.packed(packing.counts, device=rows.device)):
            return cast("Tensor", self.connector(rows_at(packing.read, rows)))

    def velocity(self, patches: Tensor, times: Tensor, connected: Tensor, packing: Packing) -> Tensor:
        """Return with which velocity pictures move, fp32, [N·L, E].

        Args:
            patches: where they are, fp32, [N·L, E].
            times: when, fp32, [N, 1].
            connected: of `connected`.
            packing: of the pictures.
        """
        config, keys, device = self.config, self.draw_keys, patches.device
        count, like = len(times), connected
        with keys.at(keys.packed([config.targets] * count, device=device)):
            embedded = self.patch(patches.to(like))
        embedded = embedded + grid_positions(config.grid, config.hidden, like=like).repeat(count, 1)
        x = rows_at(packing.joined, torch.cat((connected, embedded)))
        of_pictures = keys.packed([1] * count, device=device)
        with keys.at(of_pictures):
            moments = functional.silu(self.time(sines(times * _TIME_SCALE, config.hidden).to(like)))  # [N, W]
            shift, scale = self.modulation(moments).unsqueeze(1).chunk(_OUTPUT_PARTS, 2)  # [N, 1, W]
        with keys.at(keys.packed(packing.lengths, device=device)):
            for layer in self.layers:
                x = layer(x, moments, packing.owners, packing.segments, of_pictures.rows)
        found = x.index_select(0, packing.patches).view(count, config.targets, config.hidden)
        with keys.at(keys.packed([config.targets] * count, device=device)):
            velocity = self.output(modulated(found, shift, scale, config.norm_eps).flatten(0, 1))
        return cast("Tensor", velocity.float())


def rows_at(index: Tensor, rows: Tensor) -> Tensor:
    """Return ``rows`` [N, F] at an index [T] that may repeat, [T, F].

    The gradient of one that repeats is summed in the same order in each run, on CUDA too, as that of `index_select` is
    not.
    """
    return functional.embedding(index, rows)


def modulated(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Return ``x`` [..., W] standardised over the width, scaled by 1 more than ``scale`` and shifted."""
    return functional.layer_norm(x, x.shape[-1:], None, None, eps) * (1 + scale) + shift


def sines(places: Tensor, width: int) -> Tensor:
    """Return sines and cosines of places [N, D], fp32, [N, D·W] (Vaswani et al. 2017, arXiv:1706.03762, section 3.5).

    Args:
        places: numbers, fp32.
        width: W, of each.
    """
    half = width // 2
    frequencies = _PERIOD ** -(torch.arange(half, dtype=places.dtype, device=places.device) / half)
    angles = places.unsqueeze(2) * frequencies  # [N, D, W / 2]
    return torch.cat((angles.sin(), angles.cos()), 2).flatten(1)


def grid_positions(grid: tuple[int, int], width: int, *, like: Tensor) -> Tensor:
    """Return the positions [L, W] of patches: half of the columns for the row, half for the column, each as `sines`."""
    down, across = grid
    places = torch.cartesian_prod(torch.arange(down), torch.arange(across)).view(-1, 2)
    return sines(to_device(places, like.device, torch.float32), width // 2).to(like)
