"""Random numbers that follow from keys alone: the same on every device and in every layout, without a generator.

They are the outputs of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"): the
n-th output of a generator that begins at a key is a mix of the key and n, so any of them is computed by itself, and an
output may be the key of a further generator. A mix takes eleven elementwise operations for two numbers of 32 bits; ten
rounds of Philox (Salmon et al. 2011) take more than a hundred for four, and both pass BigCrush. All of it is exact
integer arithmetic that wraps, in ``int64``, since PyTorch computes nothing with ``uint64``.

Shapes: R keys, F numbers of each.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

_BITS = 64
_HALF = 32
_LOW = (1 << _HALF) - 1


def _signed(number: int) -> int:
    """Return a number modulo 2^64 as ``int64`` has it."""
    number &= (1 << _BITS) - 1
    return number - (1 << _BITS) if number >> (_BITS - 1) else number


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Return ``x`` shifted right with zeros from the left, whatever its sign."""
    return (x >> by) & ((1 << (_BITS - by)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def fold(keys: Tensor, number: Tensor | int) -> Tensor:
    """Return the keys that a number makes of others: output ``number`` of the generators that begin at ``keys``.

    Args:
        keys: ``int64``.
        number: 0 or more, or any ``int64`` where it is a hash; a tensor is broadcast.
    """
    if isinstance(number, int):
        return _mix(keys + _signed((number + 1) * _GOLDEN))
    return _mix(keys + (number + 1) * _GOLDEN)


def key_of(*numbers: int) -> Tensor:
    """Return the key, a scalar on the CPU, of a few numbers in order."""
    key = torch.zeros((), dtype=torch.int64, device="cpu")
    for number in numbers:
        key = fold(key, number)
    return key


def key_of_name(name: str) -> int:
    """Return a hash of a name, an ``int64``."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=_BITS // 8).digest(), "big", signed=True)


def _words(keys: Tensor, first: int, count: int) -> Tensor:
    """Return outputs ``first`` .. ``first + count`` of each key, [R, count]."""
    return fold(keys.unsqueeze(1), torch.arange(first, first + count, device=keys.device))


def _halves(words: Tensor) -> tuple[Tensor, Tensor]:
    return words & _LOW, _shifted(words, _HALF)


def _joined(low: Tensor, high: Tensor, *, skipped: int, count: int) -> Tensor:
    """Return what was made of halves [R, W] in turn, [R, count], without the first ``skipped``."""
    return torch.stack((low, high), 2).flatten(1)[:, skipped : skipped + count]


def _span(first: int, count: int) -> tuple[int, int]:
    """Return which words hold the numbers ``first`` .. ``first + count``, two each: the first, and how many."""
    return first // 2, (first + count + 1) // 2 - first // 2


def uniform(keys: Tensor, count: int, *, first: int = 0) -> Tensor:
    """Return numbers between 0 and 1, fp32, [R, count]: odd multiples of 2^-24, so that neither end is among them.

    Args:
        keys: [R], ``int64``.
        count: F.
        first: which number of each key is the first; so a rank draws the columns that lie there.
    """
    halves = _halves(_words(keys, *_span(first, count)))
    low, high = ((half >> 9).float().add(0.5).mul(2.0**-23) for half in halves)
    return _joined(low, high, skipped=first % 2, count=count)


def normal(keys: Tensor, count: int, *, first: int = 0) -> Tensor:
    """Return numbers of the standard normal distribution, fp32, [R, count]; for the arguments see `uniform`.

    They are made in double precision (Box and Muller 1958), so that devices agree on all bits but where one rounds
    the last of 53 otherwise and that decides the last of 24.
    """
    low, high = (half.double().add(0.5).mul(2.0**-_HALF) for half in _halves(_words(keys, first, count)))
    return (high.log().mul(-2).sqrt() * low.mul(2 * math.pi).cos()).float()


def threshold_of(rate: float) -> int:
    """Return below which of 2^32 numbers something is dropped that is to be at this rate."""
    return min(round(rate * (1 << _HALF)), _LOW)


def keep(keys: Tensor, count: int, threshold: Tensor | int, *, first: int = 0) -> Tensor:
    """Return what is kept where things are dropped at random, bool, [R, count]; for the others see `uniform`.

    Args:
        keys: [R], ``int64``.
        count: F.
        threshold: of `threshold_of`.
        first: which number of each key is the first.
    """
    low, high = (half >= threshold for half in _halves(_words(keys, *_span(first, count))))
    return _joined(low, high, skipped=first % 2, count=count)
