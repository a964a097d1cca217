"""Whisper's audio encoder over packed rows of clips of any length up to its window.

After Radford et al. 2022, arXiv:2212.04356, section 2.2: two convolutions over the log-mel spectrum, sinusoidal
positions, pre-norm layers. A clip's rows attend to one another, and to the silence behind it where ``silence`` says so.
Shapes: M mel bands, F frames of 10 ms, T rows of 20 ms of this rank's slice, padding included, R rows of a clip, K rows
stacked to one, W encoder width, H the language model's width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from mimo.model.runtime import Dropout, EncoderLayer, LayerNorm, Linear, PackedEncoder, Projector, touched_by
from mimo_encoder_audio._config import WhisperConfig, encoded_rows, stacked_rows

_EPS = 1e-5
_TAPS = 3  # of both convolutions


class Positions(nn.Module):
    """A row for each 20 ms of the window: sines, then cosines (Vaswani et al. 2017, section 3.5). It isn't trained.

    It is a parameter, since published weights have it and may hold other values.
    """

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width), requires_grad=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Write the waves."""
        count, width = self.weight.shape
        frequencies = torch.exp(-math.log(10000) / (width // 2 - 1) * torch.arange(width // 2))
        angles = torch.arange(count).unsqueeze(1) * frequencies
        self.weight.copy_(torch.cat((angles.sin(), angles.cos()), 1))


class AudioTransformer(PackedEncoder):
    """The whole encoder, or after `cut` one pipeline stage of it.

    The convolutions are products of windows of neighbours with a weight [W, taps · inputs].
    """

    first_only = ("conv1", "conv2", "positions", "embedding_drop")
    last_only = ("norm", "projector")

    def __init__(self, config: WhisperConfig, hidden: int) -> None:
        super().__init__(
            EncoderLayer(
                config.width,
                config.heads,
                config.intermediate,
                eps=_EPS,
                dropout=config.dropout,
                activation_dropout=config.activation_dropout,
            )
            for _ in range(config.layers)
        )
        self.config = config
        self.conv1 = Linear(_TAPS * config.mels, config.width)
        self.conv2 = Linear(_TAPS * config.width, config.width)
        self.positions = Positions(config.positions, config.width)
        self.embedding_drop = Dropout(config.dropout)
        self.norm = LayerNorm(config.width, eps=_EPS)
        self.projector = Projector(config.projector, config.width * config.stack, hidden)

    def forward(
        self,
        items: Sequence[Mapping[str, Tensor]],
        sizes: Sequence[tuple[int, ...]],
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Return this rank's rows of all clips in order: [T, H] from the last stage, [T, W] from the others.

        Args:
            items: prepared clips, on the first stage.
            sizes: their header sizes.
            hidden: rows [T, W] of the stage before; None on the first.
        """
        lengths = [encoded_rows(self.config, size) for size in sizes]
        if hidden is None:
            hidden = self._embed([item["mel"] for item in items], lengths)
        hidden = self.pass_layers(hidden, lengths)
        if self.stage.ends_tower:
            hidden = self.norm(hidden)
        if not self.stage.is_last:
            return hidden
        stacked = [stacked_rows(self.config, size) for size in sizes]
        if self.config.stack > 1 or self.config.silence == "hear":
            index = _stacks(lengths, stacked, self.config.stack)
            hidden = self.rows.take(hidden, index, total=sum(lengths))
        return cast("Tensor", self.projector(hidden, [(rows, 1) for rows in stacked], self.rows))

    def _embed(self, clips: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
        """Return rows with their positions added, [T, W]: this rank's, made of what they see of their clips.

        Args:
            clips: [2 R + 2, M] each, the frames with one before and one behind them.
            lengths: R of each.
        """
        held, keys = self.rows.held(sum(lengths)), self.draw_keys
        touched, here = touched_by(held, lengths)
        weight = self.conv1.weight
        pieces, places, offset = [weight.new_empty(0, weight.shape[1])], [], 0
        numbers, before = [torch.arange(0)], 2 * sum(lengths[: touched.start])  # of the frames among those of all clips
        for clip, length in zip(clips[touched], lengths[touched], strict=True):
            assert len(clip) == 2 * length + 2, f"a clip of {len(clip)} frames, by its size of {length} rows"
            rows = range(max(0, here.start - offset), min(length, here.stop - offset))
            first = max(0, 2 * rows.start - 1)  # a row sees three frames, of which the first may lie before the clip
            pieces.append(_windows(clip[first : 2 * rows.stop + 2].to(weight), stride=1))
            places.append(rows)
            numbers.append(torch.arange(len(pieces[-1])) + before + first)
            offset += length
            before += 2 * length
        frame_keys = keys.packed([2 * length for length in lengths], torch.cat(numbers), device=weight.device)
        with keys.at(frame_keys):
            frames = functional.gelu(self.conv1(torch.cat(pieces)))  # [F, W]
        seen = [frames[:0].repeat(1, _TAPS)]
        for rows, own in zip(places, frames.split([len(piece) for piece in pieces])[1:], strict=True):
            seen.append(_windows(own if rows.start else functional.pad(own, (0, 0, 1, 0)), stride=2))
        joined = torch.cat(seen)
        table = self.positions.weight
        positions = torch.cat([table[:0], *(table[rows.start : rows.stop] for rows in places)])
        with keys.at(keys.packed(lengths, held[: len(joined)], device=weight.device)):
            embedded = self.embedding_drop(functional.gelu(self.conv2(joined)) + positions)
        return self.rows.pad(embedded, total=sum(lengths))


def _windows(x: Tensor, *, stride: int) -> Tensor:
    """Return three rows at a time of ``x`` [F, I] as one, the next ``stride`` rows on, [.., 3·I]."""
    return x.unfold(0, _TAPS, stride).transpose(1, 2).flatten(1)


def _stacks(lengths: Sequence[int], stacked: Sequence[int], stack: int) -> Tensor:
    """Return which of all clips' rows each stacked one is made of, [R, K]: the first of each clip."""
    pieces, start = [torch.empty(0, stack, dtype=torch.long)], 0
    for length, rows in zip(lengths, stacked, strict=True):
        pieces.append(torch.arange(start, start + rows * stack).view(-1, stack))
        start += length
    return torch.cat(pieces)
