"""Keyed permutations: onto, one value at a time, equal to what is computed by hand, and as mixed as drawn ones."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from itertools import permutations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo.data.order.permutation import Permutation

keys = st.lists(st.integers(0, 2**70), min_size=1, max_size=4)
MASK = 2**64 - 1


def by_hand(size: int, key: list[int], place: int) -> int:
    """Return where one place is permuted to, in whole numbers of Python."""
    left_size = next(side for side in range(1, size + 1) if side * side >= size)
    right_size = math.ceil(size / left_size)
    text = " ".join(map(str, key)).encode()
    digests = [hashlib.blake2b(text, digest_size=48, person=b"mimo.order.2", salt=bytes([half])) for half in (0, 1)]
    block = b"".join(digest.digest() for digest in digests)
    rounds = [int.from_bytes(block[at : at + 8], "little") for at in range(0, 96, 8)]
    while True:
        right, left = divmod(place, left_size)
        for number, secret in enumerate(rounds):
            mixed = right ^ secret
            mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & MASK
            mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & MASK
            mixed ^= mixed >> 31
            left, right = right, ((left + mixed) & MASK) % (right_size if number % 2 else left_size)
        place = right * left_size + left
        if place < size:
            return place


@settings(deadline=None)
@given(st.integers(1, 3000), keys)
def test_data_permutation_is_onto(size: int, key: list[int]) -> None:
    """Every number below the size is reached once."""
    found = Permutation(size, *key)(np.arange(size))
    assert np.array_equal(np.sort(found), np.arange(size))


@settings(deadline=None)
@given(st.integers(1, 5000), keys, st.data())
def test_data_permutation_is_what_is_computed_by_hand(size: int, key: list[int], data: st.DataObject) -> None:
    """Value by value in whole numbers, without arrays, and in whichever company a value is computed."""
    places = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=5))
    found = Permutation(size, *key)(np.array(places))
    assert found.tolist() == [by_hand(size, key, place) for place in places]
    assert Permutation(size, *key)(np.array(places[-1:])).tolist() == found[-1:].tolist()


def test_data_permutation_of_few_is_as_likely_as_any_other() -> None:
    """Over 6,000 keys each of the 24 orders of four comes up about as often: chi-square, below one in 1,000."""
    counts = Counter(tuple(Permutation(4, seed)(np.arange(4)).tolist()) for seed in range(6000))
    expected = 6000 / 24
    assert sum((counts[order] - expected) ** 2 / expected for order in permutations(range(4))) < 49.7


def test_data_permutation_leaves_no_neighbours_beside_each_other() -> None:
    """Of 10,000 numbers hardly more follow on the number before them than one would by chance."""
    found = Permutation(10_000, 7)(np.arange(10_000))
    assert np.count_nonzero(np.diff(found) == 1) < 12
    assert abs(np.corrcoef(np.arange(10_000), found)[0, 1]) < 0.05


def test_data_permutation_reaches_far() -> None:
    """Of 2^61 numbers any is computed by itself."""
    size = 2**61 - 1
    assert Permutation(size, 3)(np.array([size - 1])).tolist() != [size - 1]
    assert 0 <= int(Permutation(size, 3)(np.array([size - 1]))[0]) < size
