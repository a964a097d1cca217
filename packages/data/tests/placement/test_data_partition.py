"""Things put into bins so that the fullest is low."""

from __future__ import annotations

import numpy as np
import pytest

from mimo.data.placement.partition import Whole, partition

FREE = 1 << 40
"""More rows than there are."""


def fullest(found: Whole, costs: Whole, bins: int) -> float:
    """Return what is in the fullest bin over what is in one on average."""
    return float(np.bincount(found, weights=costs, minlength=bins).max() / costs.sum() * bins)


@pytest.mark.parametrize("bins", [1, 3, 4, 12])
def test_partition_of_equal_things_keeps_neighbours_together(bins: int) -> None:
    """Each bin has equally many, the first ones one more where that isn't possible, in the order in which they are."""
    costs = np.full(10, 7)
    found = partition(costs, costs, bins, most_rows=FREE, rounds=16)
    assert found is not None
    assert found.tolist() == [number for number in range(bins) for _ in range(10 // bins + (number < 10 % bins))]


@pytest.mark.parametrize("each", [23, 24, 25, 26, 500])
def test_partition_of_many_things_a_bin_is_even_and_of_equal_numbers(each: int) -> None:
    """So are bins of more things than are exchanged, of which those beyond are dealt to and fro."""
    costs = np.random.default_rng(each).integers(1, 1 << 30, 8 * each)
    found = partition(costs, np.zeros_like(costs), 8, most_rows=0, rounds=16, spare=0)
    assert found is not None
    assert np.bincount(found).tolist() == [each] * 8
    assert fullest(found, costs, 8) < 1.001


def test_partition_has_full_bins_meet_empty_ones_of_every_rank() -> None:
    """Bins of two large things give some to those of a larger one, wherever these stand among the emptier bins."""
    rng = np.random.default_rng(0)
    pictures = np.where(rng.random(2048) < 0.35, 0, rng.integers(1, 11, 2048))
    lengths = 256 * pictures + rng.integers(16, 513, 2048)
    found = partition(lengths, lengths, 512, most_rows=FREE, rounds=16)
    assert found is not None
    assert fullest(found, lengths, 512) < 1.025
