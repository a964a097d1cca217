"""The order of whole numbers, found faster than by a stable sort."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MANY = 512
"""From so many on it is faster."""
_BITS = 63
"""Binary digits of a number."""


def ascending(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the places of values ``[N]``, the least first, of equal ones the first, as a stable argsort does.

    Each is joined with its place to one number, all of them different, so that any sort finds the same order.
    """
    if len(values) >= _MANY:
        bits = len(values).bit_length()
        least = values.min()
        span = int(values.max()) - int(least)
        for kind in (np.uint8, np.uint16):
            if span <= np.iinfo(kind).max:
                return np.argsort((values - least).astype(kind), kind="stable")  # by digits, without comparing
        if span < 1 << (_BITS - bits):
            joined: NDArray[np.int64] = (values - least << bits) | np.arange(len(values))
            joined.sort()
            joined &= (1 << bits) - 1
            return joined
    order: NDArray[np.int64] = np.argsort(values, kind="stable")
    return order


def ranks_of(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return of each value how many go before it in this order."""
    found = np.empty(len(values), dtype=np.int64)
    found[ascending(values)] = np.arange(len(values))
    return found


def grouped(groups: NDArray[np.int64], values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the places of groups from -1 on ``[N]``, in each those of the largest of values from 0 on ``[N]`` first.

    Of equal ones the first come first, as with `numpy.lexsort`.
    """
    return ascending(groups * (int(values.max(initial=0)) + 1) - values)


def firsts_of(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return of each of some numbers, of which equal ones are neighbours, the place of the first that equals it."""
    begins = np.diff(values, prepend=values[:1] - 1) != 0
    found: NDArray[np.int64] = np.maximum.accumulate(np.where(begins, np.arange(len(values)), 0))
    return found
