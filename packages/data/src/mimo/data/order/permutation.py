"""Keyed permutations of 0 … n - 1 of which any value is computed by itself, without a list of all of them."""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 12
"""Even. Four make a pseudorandom permutation of a large set (Luby and Rackoff, 1988), small ones need more."""
_PERSON = b"mimo.order.2"
"""Apart from what else might be derived of the same numbers. The order of saved runs follows from it."""
_SHIFTS_AND_FACTORS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = np.uint64(31)


class Permutation:
    """A permutation of the numbers below ``size``, which follows from its key alone.

    A generalised Feistel network over a rectangle of about √n x √n, from which values that fall outside of the set are
    encrypted again until they fall inside (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002,
    sections 4 and 5). Its round function is the finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014). All of it
    is arithmetic of 64-bit integers, so that it is the same on every machine.

    Args:
        size: from 1 on, below 2^62.
        key: numbers from 0 on, of any size; other numbers make another permutation.
    """

    def __init__(self, size: int, *key: int) -> None:
        self._size = size
        self._left = max(1, math.isqrt(size - 1) + 1)  # the least whose square is n or more
        self._right = -(-size // self._left)
        self._keys = _round_keys(key)

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what each of ``places``, from 0 on and below the size, is permuted to; of the same shape."""
        found = self._encrypt(places.astype(np.uint64))
        while (outside := found >= np.uint64(self._size)).any():
            found[outside] = self._encrypt(found[outside])
        return found.astype(np.int64)

    def _encrypt(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return values of the rectangle, permuted within it."""
        sides = np.uint64(self._left), np.uint64(self._right)
        right, left = np.divmod(values, sides[0])
        for number, key in enumerate(self._keys):
            left, right = right, (left + _mixed(right ^ key)) % sides[number % 2]
        return right * sides[0] + left  # after an even number of rounds


def _round_keys(key: tuple[int, ...]) -> tuple[np.uint64, ...]:
    """Return a key for each round."""
    text = " ".join(map(str, key)).encode()
    half = 8 * _ROUNDS // 2  # bytes; one digest has 64 at most
    block = b"".join(
        hashlib.blake2b(text, digest_size=half, person=_PERSON, salt=bytes([number])).digest() for number in range(2)
    )
    return tuple(map(np.uint64, np.frombuffer(block, dtype="<u8")))


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return values with all bits mixed; sums and products are taken modulo 2^64."""
    for shift, factor in _SHIFTS_AND_FACTORS:
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    return values ^ (values >> _LAST_SHIFT)
