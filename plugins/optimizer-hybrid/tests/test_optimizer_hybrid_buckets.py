"""How parameters are put into buckets, which of these the host holds, and in which pieces they travel."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_optimizer_hybrid._buckets import bucket_numbers, cut_buckets, cut_pieces, first_of_host
from mimo_optimizer_hybrid._division import Division, travelling_bytes
from mimo_optimizer_hybrid._memory import HeldBytes

SIZES = st.lists(st.integers(min_value=0, max_value=500), max_size=30)
MOST = st.integers(min_value=1, max_value=12).map(lambda factor: 16 * factor)


@pytest.mark.parametrize(
    ("total", "bucket_bytes", "numbers"),
    [(0, 1024, 16), (100, 1 << 20, 16), (32_000, 1 << 20, 1008), (32_000, 1024, 256), (10**9, 32 << 20, 8 << 20)],
)
def test_a_bucket_is_a_thirty_second_of_a_small_model(total: int, bucket_bytes: int, numbers: int) -> None:
    """Otherwise it has the size that settings give, in either case a multiple of 16 elements."""
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
    [(0, 4), (0.04, 4), (0.06, 3), (0.1, 3), (0.29, 3), (0.31, 2), (0.5, 2), (0.9, 1), (0.94, 1), (0.96, 0), (1, 0)],
)
def test_the_host_holds_the_last_parameters(fraction: float, first: int) -> None:
    """As many as come nearest to the fraction."""
    assert first_of_host([10, 40, 40, 10], fraction) == first


@pytest.mark.parametrize(("fraction", "first"), [(0, 4), (0.4, 2), (0.6, 2), (0.99, 2), (1, 0)])
def test_what_the_device_keeps_goes_with_all_or_not_at_all(fraction: float, first: int) -> None:
    """So that it is where it is on another rank, whose other parameters are not of these sizes."""
    assert first_of_host([10, 40, 40, 10], fraction, kept=2) == first


def test_none_and_all_are_exact_with_parameters_without_numbers() -> None:
    """What holds no numbers is where nothing or everything else is."""
    assert first_of_host([0, 5, 0], 0) == 3
    assert first_of_host([0, 5, 0], 1) == 0
    assert first_of_host([], 1) == 0


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


@pytest.mark.parametrize(
    ("numbers", "pins", "taken"),
    [(0, True, 0), (1, True, 4), (5, True, 32), (8, True, 32), (9, True, 64), (9, False, 36)],
)
def test_pinned_memory_is_counted_as_torch_takes_it(numbers: int, *, pins: bool, taken: int) -> None:
    """In powers of two; other memory as it is."""
    assert travelling_bytes(numbers, pins=pins) == taken


def test_what_travels_is_pinned_and_moments_are_not() -> None:
    """A master for each bucket, and all staging buffers at once."""
    keys = {"fraction": 0.5, "bucket_bytes": 64, "staging_bytes": 0}
    plain, pinned = (Division.of([100, 10, 50, 40], **keys, pins=pins) for pins in (False, True))  # type: ignore[arg-type]
    moments, steps = 8 * 100, 4 * 3
    assert plain.bytes == HeldBytes(host=moments + steps + 4 * (10 + 50 + 40) + 2 * 64, device=8 * 100 + 4)
    assert pinned.bytes == HeldBytes(host=moments + steps + 64 + 256 + 256 + 2 * 64, device=8 * 100 + 4)
