"""Order of version 1, in which runs saved before others existed resume: a function of seed and step, epoch by epoch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parted import Parted

from mimo.data import FIRST_ORDER, DataPart, SampleOrder
from mimo.hooks import ConfigError

sizes = st.integers(1, 30)


def first(samples: int, global_batch: int, seed: int) -> SampleOrder:
    """Return the order of so many samples."""
    data = Parted((DataPart(name="", samples=samples),))
    return SampleOrder.of(data, global_batch=global_batch, seed=seed, version=FIRST_ORDER)


@settings(deadline=None)
@given(sizes, sizes, st.integers(0, 2**40))
def test_data_first_order_joins_whole_epochs(samples: int, global_batch: int, seed: int) -> None:
    """Steps strung together are permutations of all samples, one after another, without a gap or a repeat."""
    order = first(samples, global_batch, seed)
    steps = 3 * samples // global_batch + 1
    stream = [sample for step in range(1, steps + 1) for sample in order.samples(step)]
    assert len(stream) == steps * global_batch
    for start in range(0, len(stream) - samples + 1, samples):
        assert sorted(stream[start : start + samples]) == list(range(samples))
    rest = stream[len(stream) // samples * samples :]
    assert len(set(rest)) == len(rest)


@settings(deadline=None)
@given(sizes, sizes, st.integers(0, 99), st.lists(st.integers(1, 50), max_size=8), st.integers(1, 50))
def test_data_first_order_has_no_history(samples: int, batch: int, seed: int, before: list[int], step: int) -> None:
    """What a step reads does not depend on the steps read before."""
    used = first(samples, batch, seed)
    for other in before:
        used.samples(other)
    assert used.samples(step) == first(samples, batch, seed).samples(step)


def test_data_first_order_is_fixed_for_good() -> None:
    """It is the same with every numpy and on every machine, over the end of an epoch too: resumed runs rely on it."""
    assert first(8, 8, 1234).samples(1) == (1, 6, 2, 0, 3, 5, 7, 4)
    assert first(5, 7, 3).samples(2) == (1, 2, 4, 2, 3, 4, 1)


def test_data_first_order_refuses_weights() -> None:
    """It takes all samples equally often, so that weights would be ignored."""
    data = Parted((DataPart(name="a", samples=3, weight=1.0), DataPart(name="b", samples=3, weight=2.0)))
    with pytest.raises(ConfigError, match=r"data\.order: expected 2, as version 1 takes all .* got 1\. Leave it out\."):
        SampleOrder.of(data, global_batch=1, seed=0, version=FIRST_ORDER)
