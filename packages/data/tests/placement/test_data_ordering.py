"""The order of whole numbers."""

from __future__ import annotations

import numpy as np
import pytest

from mimo.data.placement.ordering import ascending, firsts_of, grouped, ranks_of


@pytest.mark.parametrize("most", [1, 40, 1 << 30, 1 << 55])
@pytest.mark.parametrize("count", [0, 1, 7, 511, 512, 5000])
def test_data_ordering_is_that_of_a_stable_sort(count: int, most: int) -> None:
    """Few or many, small or too large to be joined with their places, below and above 0, with many that are equal."""
    values = np.random.default_rng(count).integers(-most, most, count)
    expected = np.argsort(values, kind="stable")
    assert np.array_equal(ascending(values), expected)
    assert np.array_equal(ranks_of(values), np.argsort(expected, kind="stable"))


@pytest.mark.parametrize("span", [255, 256, 65_535, 65_536])
def test_data_ordering_of_a_span_that_just_fits_into_so_many_digits(span: int) -> None:
    """The greatest value comes last, and not where the least one is."""
    values = np.full(600, -5)
    values[::2] += span
    assert ascending(values).tolist() == [*range(1, 600, 2), *range(0, 600, 2)]


@pytest.mark.parametrize("count", [0, 1, 7, 5000])
def test_data_ordering_by_groups_has_the_largest_of_each_first(count: int) -> None:
    """Those in no group come before all, and of equal ones the first; each finds the first of its group."""
    rng = np.random.default_rng(count)
    groups, values = rng.integers(-1, 6, count), rng.integers(0, 40, count)
    order = grouped(groups, values)
    assert np.array_equal(order, np.lexsort((-values, groups)))
    assert np.array_equal(firsts_of(groups[order]), np.searchsorted(groups[order], groups[order]))
