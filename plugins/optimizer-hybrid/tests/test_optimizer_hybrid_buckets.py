"""How parameters are put into buckets, which of these the host holds, and in which pieces they travel."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_optimizer_hybrid._buckets import bucket_numbers, cut_buckets, cut_pieces, first_host_bucket

SIZES = st.lists(st.integers(min_value=0, max_value=500), max_size=30)
MOST = st.integers(min_value=1, max_value=12).map(lambda factor: 16 * factor)


@pytest.mark.parametrize(
    ("total", "bucket_bytes", "numbers"),
    [(0, 1024, 16), (100, 1 << 20, 16), (32_000, 1 << 20, 1008), (32_000, 1024, 256), (10**9, 32 << 20, 8 << 20)],
)
def test_a_bucket_is_a_thirty_second_of_a_small_model(total: int, bucket_bytes: int, numbers: int) -> None:
    """Otherwise it is as large as it was asked to be, in either case in multiples of 16 numbers."""
    assert bucket_numbers(total, bucket_bytes) == numbers


@settings(deadline=None)
@given(sizes=SIZES, most=MOST)
def test_buckets_hold_all_parameters_whole_and_in_order(sizes: list[int], most: int) -> None:
    """Only a parameter that is larger than a bucket makes one that is."""
    buckets = cut_buckets(sizes, most)
    assert [index for bucket in buckets for index in bucket] == list(range(len(sizes)))
    assert all(sum(sizes[index] for index in bucket) <= most or len(bucket) == 1 for bucket in buckets)


@pytest.mark.parametrize(
    ("fraction", "first"),
    [(0, 4), (0.04, 4), (0.06, 3), (0.1, 3), (0.3, 3), (0.34, 2), (0.5, 2), (0.9, 1), (0.99, 0), (1, 0)],
)
def test_the_host_holds_the_last_buckets(fraction: float, first: int) -> None:
    """As many as come nearest to the fraction, in buckets of 10, 40, 40 and 10 of 100 numbers."""
    assert first_host_bucket([10, 40, 20, 20, 10], [range(1), range(1, 2), range(2, 4), range(4, 5)], fraction) == first


def test_none_and_all_are_exact_with_parameters_without_numbers() -> None:
    """What holds no numbers is where nothing or everything else is."""
    sizes, buckets = [0, 5, 0], [range(1), range(1, 2), range(2, 3)]
    assert first_host_bucket(sizes, buckets, 0) == 3
    assert first_host_bucket(sizes, buckets, 1) == 0
    assert first_host_bucket([], [], 1) == 0


@settings(deadline=None)
@given(sizes=SIZES, most=MOST)
def test_pieces_cover_every_number_once(sizes: list[int], most: int) -> None:
    """A piece fits a staging buffer and is of one bucket; cuts lie at multiples of 16 of a parameter."""
    buckets = cut_buckets(sizes, most)
    pieces = cut_pieces(sizes, buckets, most)
    covered: list[tuple[int, int]] = []
    for piece in pieces:
        taken: list[int] = []
        for span in piece.spans:
            assert span.parameter in buckets[piece.bucket]
            assert span.start % 16 == 0
            assert span.stop % 16 == 0 or span.stop == sizes[span.parameter]
            covered += [(span.parameter, number) for number in range(span.start, span.stop)]
            taken += range(span.at, span.at + span.stop - span.start)
        assert len(set(taken)) == len(taken)
        assert all(place < most for place in taken)
    assert sorted(covered) == [(index, number) for index, size in enumerate(sizes) for number in range(size)]
    assert [piece.bucket for piece in pieces] == sorted(piece.bucket for piece in pieces)
