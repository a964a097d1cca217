"""Rotary positions (Su et al. 2021, arXiv:2104.09864): of one number for each row, or of three for a grid's rows.

Shapes: T rows, N heads, D head width.
"""

from __future__ import annotations

import math
from typing import Any, cast

import attrs
import torch
from torch import Tensor

from mimo.model.language.batch import LanguageBatch
from mimo.model.spec import AXES, RotaryConfig

_FEW = 1 << 17
"""Elements up to which three operations, one of which copies them, take less time than four that copy nothing."""


@attrs.frozen(eq=False)
class Rotation:
    """The angle by which each pair of each row is turned, once a microbatch.

    Args:
        cosines: [T, 1, D], of both columns of a pair.
        sines: [T, 1, D], of the first column negative.
    """

    cosines: Tensor
    sines: Tensor

    @classmethod
    def of(cls, batch: LanguageBatch, config: RotaryConfig) -> Rotation:
        """Return the rotation of each row of ``batch``.

        With ``mrope_section`` the first pairs follow the first axis of ``batch.grid_positions``, the next the second,
        the last the third (Wang et al. 2024, arXiv:2409.12191, section 2.1); with ``mrope_interleaved`` they take turns
        (Qwen3-VL, arXiv:2511.21631, section 2.1). Where the three are equal, as in text, that is the rotation of one
        position.
        """
        device = batch.positions.device
        positions = batch.positions.unsqueeze(1)  # [T, 1]
        if config.mrope_section and batch.grid_positions is not None:
            positions = batch.grid_positions[:, pair_axes(config)]  # [T, D / 2]
        return cls.by(positions.float() * pair_rates(config, device))

    @classmethod
    def by(cls, angles: Tensor) -> Rotation:
        """Return the rotation by angles [T, D / 2] of each row's pairs."""
        cosines, sines = angles.cos(), angles.sin()
        return cls(torch.cat((cosines, cosines), 1).unsqueeze(1), torch.cat((-sines, sines), 1).unsqueeze(1))

    def turn(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """Return rows [T, N, D] turned: column i pairs with column i + D / 2, as in published weights."""
        if torch.compiler.is_compiling():  # a compiler finds the passes over memory itself, and writes into no views
            return tuple(_turned_by_compiler(x, self.cosines, self.sines) for x in rows)
        if not torch.is_grad_enabled():
            return tuple(_turned(x, self.cosines, self.sines) for x in rows)
        return cast("tuple[Tensor, ...]", _Turn.apply(self.cosines, self.sines, *rows))  # type: ignore[no-untyped-call]  # torch leaves it untyped


def pair_axes(config: RotaryConfig) -> list[int]:
    """Return which of `AXES` each pair follows, [D / 2].

    Interleaved, a pair follows its number's rest of three where that axis has pairs left, and time otherwise.
    """
    section, count = config.mrope_section, len(AXES)
    if config.mrope_interleaved:
        return [pair % count if pair // count < section[pair % count] else 0 for pair in range(sum(section))]
    return [axis for axis in range(count) for _ in range(section[axis])]


def pair_rates(config: RotaryConfig, device: torch.device) -> Tensor:
    """Return by how many radians a position turns each pair, [D / 2]."""
    width = config.head_width
    rates = config.rope_theta ** -(torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    match config.rope_scaling:
        case "none":
            return rates
        case "linear":
            return rates / config.rope_factor
        case "llama3":
            turns = config.rope_original_tokens * rates / (2 * math.pi)  # in one of the samples that it began with
            low, high = config.rope_low_factor, config.rope_high_factor
            unstretched = ((turns - low) / (high - low)).clamp(0, 1)
            return rates * (unstretched + (1 - unstretched) / config.rope_factor)


class _Turn(torch.autograd.Function):
    """A rotation of several at once: a node of the graph takes as long as turning few rows. Its adjoint turns back."""

    @staticmethod
    def forward(ctx: Any, cosines: Tensor, sines: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cosines, sines)
        return tuple(_turned(x, cosines, sines) for x in rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cosines, sines = ctx.saved_tensors
        return None, None, *(_turned(gradient, cosines, sines, back=True) for gradient in gradients)


def _turned(x: Tensor, cosines: Tensor, sines: Tensor, *, back: bool = False) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide = x if x.dtype == dtype else x.to(dtype)  # asking for what it is takes as long as one of the sums
    sign = -1 if back else 1
    if wide.numel() <= _FEW:
        turned = (wide * cosines).addcmul_(wide.roll(wide.shape[-1] // 2, -1), sines, value=sign).contiguous()
    else:
        turned = torch.empty_like(wide, memory_format=torch.contiguous_format)
        pairs, angles = wide.chunk(2, -1), zip(cosines.chunk(2, -1), sines.chunk(2, -1), strict=True)
        for half, (into, (cosine, sine)) in enumerate(zip(turned.chunk(2, -1), angles, strict=True)):
            torch.mul(pairs[half], cosine, out=into).addcmul_(pairs[1 - half], sine, value=sign)
    return turned if x.dtype == dtype else turned.to(x.dtype)


def _turned_by_compiler(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * cosines + wide.roll(wide.shape[-1] // 2, -1) * sines).to(x.dtype)
