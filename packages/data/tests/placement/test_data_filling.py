"""Microbatches filled up to so many tokens of a lane."""

from __future__ import annotations

from itertools import pairwise
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo.data import EncoderLoads, Loads, fill, lane_rows, microbatch_numbers, place_filled, step_cost

MOST = 50


@given(st.lists(st.integers(0, MOST), max_size=200), st.booleans(), st.integers(1, 8))
def test_bins_hold_what_they_may_and_the_largest_number_of_microbatches_suffices(
    rows: list[int], in_order: bool, lanes: int
) -> None:
    """Whatever the samples are: no two bins, or neighbours in order, would go into one."""
    bins = fill(rows, most_rows=MOST, in_order=in_order)
    sums = np.bincount(bins, weights=rows) if rows else np.zeros(0)
    assert (sums <= MOST).all()
    pairs = pairwise(sums if in_order else np.sort(sums))
    assert all(one + other > MOST for one, other in pairs)
    if in_order:
        assert (np.diff(bins) >= 0).all()
    tokens = max(sum(rows), MOST)
    most = microbatch_numbers(batch_tokens=tokens, micro_tokens=MOST, lanes=lanes)[-1]
    assert int(bins.max(initial=-1)) + 1 <= most * lanes


def test_few_bins_are_needed() -> None:
    """Of samples that fill bins to the last token in some way, at most 11/9 of these and one more are taken."""
    rng = np.random.default_rng(0)
    pieces = [np.diff([0, *sorted(rng.choice(np.arange(1, MOST), 4, replace=False)), MOST]) for _ in range(100)]
    rows = rng.permutation(np.concatenate(pieces)).tolist()
    assert fill(rows, most_rows=MOST, in_order=False).max() + 1 <= 11 * 100 / 9 + 1
    assert fill([30, 30, 20, 20], most_rows=MOST, in_order=False).tolist() == [0, 1, 1, 0]
    assert fill([30, 30, 20, 20], most_rows=MOST, in_order=True).tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("tokens", "lanes", "numbers"),
    [
        (50, 1, (1,)),
        (50, 4, (1,)),
        (100, 1, (2, 3)),
        (800, 2, (8, 9, 11, 13, 16)),
        (3200, 1, (64, 65, 81, 101, 126, 127)),
    ],
)
def test_a_step_may_have_a_few_numbers_of_microbatches(tokens: int, lanes: int, numbers: tuple[int, ...]) -> None:
    """As many as full ones would be, one more, and up to twice as many in steps of a quarter."""
    assert microbatch_numbers(batch_tokens=tokens, micro_tokens=MOST, lanes=lanes) == numbers
    assert numbers[0] == ceil(tokens / MOST / lanes)


def test_lanes_get_a_bin_each_and_items_go_by_count() -> None:
    """Samples keep their order in a microbatch; those that are left over are empty."""
    rows = np.array([30, 30, 20, 20, 10])
    language = Loads(costs=rows, rows=rows, lanes=2, stages=1, passes=((0,), (1,), (2,)))
    samples = np.array([0, 2, 2, 3, 4])
    eye = EncoderLoads(
        costs=np.ones(5, dtype=np.int64),
        rows=np.ones(5, dtype=np.int64),
        lanes=3,
        stages=1,
        passes=language.passes,
        samples=samples,
        homes=((), ()),
    )
    bins = fill(rows.tolist(), most_rows=MOST, in_order=False)
    placed = place_filled(language, [eye], bins, most_rows=MOST, balanced=False)
    assert [one.samples for one in placed] == [(0, 1, 2, 3), (4,), ()]
    owners = [[list(one.owners.span(lane)) for lane in range(2)] for one in placed]
    assert owners == [[[0, 3], [1, 2]], [[0], []], [[], []]]
    items = [[list(one.items[0].span(lane)) for lane in range(3)] for one in placed]
    assert items == [[[0], [1, 2], [3]], [[0], [], []], [[], [], []]]


def test_samples_are_placed_by_cost_within_the_same_bounds() -> None:
    """Where that is quicker: here two long ones would share a lane with many short ones."""
    rng = np.random.default_rng(1)
    rows = rng.integers(1, MOST + 1, 60)
    language = Loads(costs=rows**2, rows=rows, lanes=4, stages=2, passes=tuple((index,) for index in range(11)))
    bins = fill(rows.tolist(), most_rows=MOST, in_order=False)
    filled, spread = (place_filled(language, [], bins, most_rows=MOST, balanced=how) for how in (False, True))
    assert step_cost(language, [], spread) < step_cost(language, [], filled)
    assert sorted(sample for one in spread for sample in one.samples) == list(range(60))
    assert max(map(max, lane_rows(language, [], spread))) <= MOST
