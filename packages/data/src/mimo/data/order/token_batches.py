"""Batches by tokens: which positions of the stream of samples a step reads, by how long the samples are.

A step begins where the one before ended, at a cursor that is one whole number. It follows from the order of samples and
their lengths alone, so that neither lanes nor microbatches change what a step reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import TypeAlias

import attrs

from mimo.hooks import UserError

MAX_BATCH_SAMPLES = 1 << 16
"""Of a step by tokens, however short they are."""
_READ = 64
"""Positions that are looked up at once."""
Read: TypeAlias = Callable[[int, int], Sequence[int]]
"""Returns the samples at a position and a number of those after it."""
Lengths: TypeAlias = Callable[[Sequence[int]], Iterator[int | None]]
"""Yields the tokens of samples, None for one that is left out; only as many are asked for as are needed."""


@attrs.frozen(kw_only=True)
class TokenBatch:
    """The samples of one step.

    Args:
        first: position at which it begins.
        stop: position at which the next one does.
        samples: their numbers, in order.
        dropped: how many positions between the two are left out, as their samples are too long.
    """

    first: int
    stop: int
    samples: tuple[int, ...]
    dropped: int


def token_batch(first: int, read: Read, lengths: Lengths, *, tokens: int, patience: int) -> TokenBatch:
    """Return the batch that begins at a position: as many samples as have no more than so many tokens together.

    The first that doesn't fit, or can't be read, begins the next batch, even if a later one would still fit.

    Args:
        first: position.
        read: returns samples by position.
        lengths: yields their tokens, of each at most as many as of the batch.
        tokens: of the batch at most.
        patience: how many samples may be left out one after another.

    Raises:
        ValueError: more are.
        UserError: the first one can't be read.
    """
    samples: list[int] = []
    room, dropped, misses = tokens, 0, 0
    measured, place = _measured(first, read, lengths), first - 1
    while True:
        try:
            place, number, length = next(measured)
        except UserError:
            if not samples:
                raise
            # The next batch begins with the sample that can't be read, and none is lost for it.
            return TokenBatch(first=first, stop=place + 1, samples=tuple(samples), dropped=dropped)
        if length is None:
            dropped, misses = dropped + 1, misses + 1
            if misses > patience:
                msg = f"{misses} samples one after another are left out, the last of them sample {number}"
                raise ValueError(msg)
        elif length > room or len(samples) == MAX_BATCH_SAMPLES:
            return TokenBatch(first=first, stop=place, samples=tuple(samples), dropped=dropped)
        else:
            samples.append(number)
            room, misses = room - length, 0


def _measured(first: int, read: Read, lengths: Lengths) -> Iterator[tuple[int, int, int | None]]:
    """Yield positions from one on, the sample at each, and its length."""
    for begin in count(first, _READ):
        numbers = read(begin, _READ)
        yield from zip(count(begin), numbers, lengths(numbers), strict=False)
