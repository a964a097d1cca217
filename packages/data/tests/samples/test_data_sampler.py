"""The sampler: a function of (seed, step), epoch by epoch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo.data import StepSampler

sizes = st.integers(1, 30)


@given(sizes, sizes, st.integers(0, 2**40))
def test_data_sampler_joins_whole_epochs(samples: int, global_batch: int, seed: int) -> None:
    """Steps strung together are permutations of all samples, one after another, without a gap or a repeat."""
    sampler = StepSampler(samples, global_batch, seed)
    steps = 3 * samples // global_batch + 1
    stream = [sample for step in range(1, steps + 1) for sample in sampler.samples(step)]
    assert len(stream) == steps * global_batch
    for start in range(0, len(stream) - samples + 1, samples):
        assert sorted(stream[start : start + samples]) == list(range(samples))
    rest = stream[len(stream) // samples * samples :]
    assert len(set(rest)) == len(rest)


@given(sizes, sizes, st.integers(0, 99), st.lists(st.integers(1, 50), max_size=8), st.integers(1, 50))
def test_data_sampler_has_no_history(samples: int, batch: int, seed: int, before: list[int], step: int) -> None:
    """What a step reads does not depend on the steps asked for before."""
    used = StepSampler(samples, batch, seed)
    for other in before:
        used.samples(other)
    assert used.samples(step) == StepSampler(samples, batch, seed).samples(step)


def test_data_sampler_stream_ignores_batch() -> None:
    """Another global batch cuts the same stream elsewhere."""
    fine, coarse = StepSampler(10, 1, 5), StepSampler(10, 25, 5)
    assert tuple(fine.samples(step)[0] for step in range(1, 26)) == coarse.samples(1)


def test_data_sampler_differs_by_seed_and_epoch() -> None:
    """Each seed and each epoch has its own order."""
    sampler = StepSampler(100, 100, 0)
    assert sampler.samples(1) != sampler.samples(2)
    assert sampler.samples(1) != StepSampler(100, 100, 1).samples(1)


def test_data_sampler_is_fixed_for_good() -> None:
    """The order is the same with every numpy and on every machine: resumed runs rely on it."""
    assert StepSampler(8, 8, 1234).samples(1) == (1, 6, 2, 0, 3, 5, 7, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 0), "samples: expected at least 1, got 0"),
        ((1, 0, 0), "global_batch: expected at least 1, got 0"),
        ((1, 1, -1), "seed: expected at least 0, got -1"),
    ],
)
def test_data_sampler_refuses_wrong_sizes(arguments: tuple[int, int, int], message: str) -> None:
    """Sizes out of range are refused by name."""
    with pytest.raises(ValueError, match=message):
        StepSampler(*arguments)


def test_data_sampler_counts_from_one() -> None:
    """There is no step 0."""
    with pytest.raises(ValueError, match="step: expected at least 1, got 0"):
        StepSampler(3, 1, 0).samples(0)
