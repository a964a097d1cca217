"""AdamW whose moments lie in bf16, rounded up or down by chance, so that what is lost in one step is made up in others.

Rounding to the nearest would stop an average whose change at a step is less than half a bit, which is a 512th of it:
squares that fall by a thousandth a step would stay for ever. Rounded up as often as the part that is cut off says, an
average moves as it does in fp32 (Gupta et al. 2015, arXiv:1502.02551). Chance is a hash of the number's bits and of the
step: the same in every run and layout that computes the same number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mimo.optimizer.runtime._fused_adamw import fused_adamw

CHUNK = 1 << 22
"""Numbers whose moments are in fp32 at one time: 32 MiB."""
_CUT_BITS = 16  # of fp32, which bf16 lacks
_FACTORS = (0x7FEB352D, 0x846CA68B - (1 << 32))  # of a hash by Wellons (2018, "Prospecting for Hash Functions")


def rounded(values: Tensor, step: Tensor) -> Tensor:
    """Return fp32 numbers in bf16, each one of its two neighbours: on average over steps, itself.

    Args:
        values: finite; those that bf16 has stay as they are.
        step: which one this is, a scalar tensor.
    """
    bits = values.view(torch.int32)
    chance = bits ^ (step.to(torch.int32) * _FACTORS[1])
    for shift, factor in ((16, _FACTORS[0]), (15, _FACTORS[1])):
        chance ^= chance >> shift
        chance *= factor
    chance ^= chance >> 16
    chance &= (1 << _CUT_BITS) - 1
    chance += bits  # into the next number of bf16 if what is cut off and chance exceed it
    chance &= -(1 << _CUT_BITS)
    return chance.view(torch.float32).to(torch.bfloat16)


def bf16_adamw(
    parameters: list[Tensor],
    gradients: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
    settings: Mapping[str, Any],
) -> None:
    """Step contiguous fp32 tensors in place as `fused_adamw` does, with ``averages`` and ``squares`` in bf16."""
    flat = (gradient.contiguous() for gradient in gradients)
    for chunk in _chunks(zip(parameters, flat, averages, squares, steps, strict=True)):
        own, grads, saved_averages, saved_squares, counts = (list(tensors) for tensors in zip(*chunk, strict=True))
        exact = [average.float() for average in saved_averages], [square.float() for square in saved_squares]
        fused_adamw(own, grads, *exact, counts, settings)
        for places, values in zip((saved_averages, saved_squares), exact, strict=True):
            for place, value, step in zip(places, values, counts, strict=True):
                place.copy_(rounded(value, step))


def _chunks(rows: Iterable[tuple[Tensor, ...]]) -> Iterator[list[tuple[Tensor, ...]]]:
    """Yield views of the same tensors, at most `CHUNK` numbers of each at a time; the last of a row is its step."""
    held: list[tuple[Tensor, ...]] = []
    numbers = 0
    for *whole, step in rows:
        for pieces in zip(*(tensor.view(-1).split(CHUNK) for tensor in whole), strict=True):
            if held and numbers + len(pieces[0]) > CHUNK:
                yield held
                held, numbers = [], 0
            held.append((*pieces, step))
            numbers += len(pieces[0])
    if held:
        yield held
