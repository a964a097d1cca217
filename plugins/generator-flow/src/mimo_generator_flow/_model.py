"""Flow matching over the patches of pictures (Lipman et al. 2022, arXiv:2210.02747; Liu et al. 2022, arXiv:2209.03003).

A picture is a point on a straight way from noise, at time 0, to data, at time 1; the network says with which velocity
it moves there, data less noise. It is a transformer over the picture's rows of the language model and its patches, one
after the other; time enters by modulation of the norms, which are the identity's at first (adaLN-zero of DiT, Peebles
and Xie 2022, arXiv:2212.09748, section 3.2).
Shapes: N pictures, L patches of each, E numbers of a patch, R rows of the language model, H their width, c rows that
pictures are made from, T rows of the sequence, W width inside; of these t, c and p this rank's alone, see `Packing`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from mimo.model import Stage
from mimo.model.runtime import (
    DrawKeys,
    Embedding,
    EncoderAttention,
    EncoderMlp,
    LayerNorm,
    Linear,
    PackedRows,
    Segments,
    packed_patches,
    to_device,
    touched_by,
)
from mimo_generator_flow._config import FlowConfig, message_rows
from mimo_generator_flow._draws import draw_dropped, draw_noise, draw_times
from mimo_generator_flow._packing import Packing, rows_at

_TIME_SCALE = 1000.0
"""By what times are multiplied before their sines are taken, so that the fastest of these turn often."""
_PERIOD = 10000.0
_LAYER_PARTS = 6
_OUTPUT_PARTS = 2
_FIRST_ONLY = ("connector", "patch", "time")
_LAST_ONLY = ("modulation", "output")


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


class Moments(nn.Module):
    """What becomes of times: two products on one row of each picture, which no tensor ranks share out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = Linear(width, width)
        self.down = Linear(width, width)

    def forward(self, waves: Tensor) -> Tensor:
        """Return [N, W] of the sines and cosines of times [N, W]."""
        return functional.silu(self.down(functional.silu(self.up(waves))))


class FlowTransformer(nn.Module):
    """The whole generator, or after `cut` one pipeline stage of it.

    Attributes:
        layers: those of this stage, by global index.
        rows: which of the sequence of all pictures this rank holds.
        stage: which part of the whole it is.
        draw_keys: by which adaptation of its linears draws at random, where it does.
    """

    def __init__(self, config: FlowConfig, hidden: int) -> None:
        super().__init__()
        width = config.hidden
        self.config = config
        self.connector = Connector(hidden, width, eps=config.norm_eps)
        self.patch = Linear(config.patch_width, width)
        self.time = Moments(width)
        self.layers = nn.ModuleDict({str(index): FlowLayer(config) for index in range(config.layers)})
        self.modulation = ZeroLinear(width, _OUTPUT_PARTS * width)
        self.output = ZeroLinear(width, config.patch_width)
        self.rows = PackedRows()
        self.stage = Stage()
        self.draw_keys = DrawKeys()

    def cut(self, stage: Stage) -> None:
        """Keep what ``stage`` runs of the whole."""
        self.stage = stage
        for index in set(range(self.config.layers)) - set(stage.layers(self.config.layers)):
            del self.layers[str(index)]
        gone = (*(() if stage.is_first else _FIRST_ONLY), *(() if stage.is_last else _LAST_ONLY))
        for name in gone:
            delattr(self, name)

    def forward(
        self,
        items: Sequence[Mapping[str, Tensor]],
        rows: Tensor | None,
        spans: Sequence[tuple[int, int]],
        keys: Tensor,
        _sizes: Sequence[tuple[int, ...]] = (),
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Return for each patch of each picture how far the velocity is off, its mean square, fp32, [N·L].

        Of several stages the last does; the others return what they send to the next, [t, W]. Outside of training no
        picture does without its rows.

        Args:
            items: prepared pictures, on the first and the last stage.
            rows: of the language model [R, H], in the type of the parameters, on the first stage.
            spans: which rows each picture is made from; they may overlap or be empty.
            keys: [N] on the CPU, by which all is drawn.
            hidden: what the stage before sends [t, W]; None on the first.
        """
        given = rows if hidden is None else hidden
        assert given is not None
        sent = sum(message_rows(self.config, stop - start) for start, stop in spans) if self.stage.count > 1 else 0
        if self.training:
            dropped = draw_dropped(self.config, keys)
            spans = [(0, 0) if drops else span for span, drops in zip(spans, dropped, strict=True)]
        packing = self.pack(spans, device=given.device, sent=sent)
        noise, way = self._way(items, keys, packing, device=given.device)
        if hidden is None:
            times = draw_times(self.config, keys, device=given.device)
            moments = self.moments(times)
            moved = noise + times.index_select(0, packing.owners.index_select(0, packing.patches)) * way
            x = packing.entered(self.connected(given, packing), self.embedded(moved, packing))
        else:
            x, moments = packing.received(hidden)
        x = self.passed(x, moments, packing)
        if not self.stage.is_last:
            return packing.message(x, moments)
        return packing.each_once((self.left(x, moments, packing) - way).square().mean(1))

    def _way(
        self, items: Sequence[Mapping[str, Tensor]], keys: Tensor, packing: Packing, *, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return what this rank's patches begin as, and from there the way to data, fp32, [p, E]; none between."""
        config = self.config
        if not items:
            keys = keys[:0]
        touched, here = touched_by(packing.mine, [config.targets] * len(packing.counts))
        noise = draw_noise(config, keys[touched], device=device)[here]
        data = packed_patches(
            (item["pixels"] for item in items[touched]),
            patch=config.patch,
            like=torch.empty(0, device=device),
            width=config.patch_width,
            channels_last=True,
        )
        return noise, data[here] - noise

    def pack(self, spans: Sequence[tuple[int, int]], *, device: torch.device, sent: int = 0) -> Packing:
        """Return how pictures lie that are made from these rows; ``sent`` as for `Packing.of`."""
        return Packing.of(spans, patches=self.config.targets, device=device, rows=self.rows, sent=sent)

    def connected(self, rows: Tensor, packing: Packing) -> Tensor:
        """Return the learned row and this rank's of those that pictures are made from, [1 + c, W] of [R, H]."""
        keys = self.draw_keys
        every = self.rows.gather(rows, total=len(rows) * self.rows.slices)
        with keys.at(keys.packed(packing.counts, packing.numbers, device=rows.device)):
            return cast("Tensor", self.connector(rows_at(packing.read, every)))

    def embedded(self, patches: Tensor, packing: Packing) -> Tensor:
        """Return the rows [p, W] of patches [p, E], where they are at the pictures' times."""
        config, keys, count, weight = self.config, self.draw_keys, len(packing.counts), self.patch.weight
        touched, here = touched_by(packing.mine, [config.targets] * count)
        with keys.at(keys.packed([config.targets] * count, packing.mine, device=patches.device)):
            found = self.patch(patches.to(weight))
        positions = grid_positions(config.grid, config.hidden, like=weight).repeat(len(packing.counts[touched]), 1)
        return cast("Tensor", found + positions[here])

    def moments(self, times: Tensor) -> Tensor:
        """Return what becomes of times, fp32, [N, 1]: rows [N, W]."""
        keys = self.draw_keys
        with keys.at(keys.packed([1] * len(times), device=times.device)):
            waves = sines(times * _TIME_SCALE, self.config.hidden)
            return cast("Tensor", self.time(waves.to(self.time.up.weight)))

    def passed(self, x: Tensor, moments: Tensor, packing: Packing) -> Tensor:
        """Return this rank's rows [t, W] after the layers of this stage."""
        keys, device = self.draw_keys, x.device
        of_pictures = keys.packed([1] * len(moments), device=device).rows
        with keys.at(keys.packed(packing.lengths, self.rows.entered(packing.total), device=device)):
            for layer in self.layers.values():
                x = layer(x, moments, packing.owners, packing.segments, of_pictures)
        return x

    def left(self, x: Tensor, moments: Tensor, packing: Packing) -> Tensor:
        """Return with which velocity this rank's patches move, fp32, [p, E], of its rows [t, W] behind all layers."""
        config, keys, count = self.config, self.draw_keys, len(moments)
        with keys.at(keys.packed([1] * count, device=x.device)):
            changes = self.modulation(moments)
        owners = packing.owners.index_select(0, packing.patches)
        shift, scale = rows_at(owners, changes).chunk(_OUTPUT_PARTS, 1)
        found = modulated(x.index_select(0, packing.patches), shift, scale, config.norm_eps)
        with keys.at(keys.packed([config.targets] * count, packing.mine, device=x.device)):
            return cast("Tensor", self.output(found).float())

    def velocity(self, patches: Tensor, times: Tensor, connected: Tensor, packing: Packing) -> Tensor:
        """Return with which velocity pictures move, fp32, [N·L, E]: of a module that one rank holds whole.

        Args:
            patches: where they are, fp32, [N·L, E].
            times: when, fp32, [N, 1].
            connected: of `connected`.
            packing: of the pictures.
        """
        moments = self.moments(times)
        x = packing.entered(connected, self.embedded(patches, packing))
        return self.left(self.passed(x, moments, packing), moments, packing)


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
