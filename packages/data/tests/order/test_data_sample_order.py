"""The order of samples by parts and shards: whole epochs, exact shares, from any step on, in little memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parted import Parted

from mimo.data import DataPart, SampleOrder, WeightChange
from mimo.data.order.epochs import WINDOW_SHARDS
from mimo.hooks import ConfigError, PluginError

PERIOD = 1 << 16
FEW = settings(max_examples=20, deadline=None)
"""Each example computes the orders of some periods, a hundredth of a second each."""
seeds = st.integers(0, 2**70)
shard_sizes = st.lists(st.integers(0, 9), min_size=1, max_size=30).filter(any)
weights = st.floats(0.05, 20.0)


@st.composite
def mixtures(draw: st.DrawFn, least: int = 1) -> Parted:
    """Return up to four parts with weights, each with some shards or none."""
    parts = []
    for number in range(draw(st.integers(least, 4))):
        shards = draw(shard_sizes)
        whole = draw(st.booleans())
        parts.append(
            DataPart(
                name=f"part{number}", samples=sum(shards), shards=() if whole else tuple(shards), weight=draw(weights)
            )
        )
    return Parted(tuple(parts))


def single(samples: int, shards: Sequence[int] = ()) -> Parted:
    """Return a dataset of one part."""
    return Parted((DataPart(name="", samples=samples, shards=tuple(shards)),))


def order_of(data: Parted, *, batch: int = 8, seed: int = 0, changes: Sequence[WeightChange] = ()) -> SampleOrder:
    """Return the order of some parts."""
    return SampleOrder.of(data, global_batch=batch, seed=seed, changes=changes)


def by_part(data: Parted, stream: Sequence[int]) -> list[list[int]]:
    """Return the samples that a stream takes from each part, numbered within it."""
    ends = np.cumsum([part.samples for part in data.given])
    numbers = np.array(stream, dtype=np.int64)
    parts = np.searchsorted(ends, numbers, side="right")
    return [(numbers[parts == place] - (ends[place] - part.samples)).tolist() for place, part in enumerate(data.given)]


def is_of_whole_epochs(stream: Sequence[int], samples: int) -> bool:
    """Return whether a stream is permutations of a part, one after another, and the beginning of one."""
    epochs = [stream[at : at + samples] for at in range(0, len(stream), samples)]
    return all(len(set(epoch)) == len(epoch) for epoch in epochs) and set(stream) <= set(range(samples))


def shares(data: Parted, stream: Sequence[int]) -> list[int]:
    """Return how many samples a stream takes from each part."""
    ends = np.cumsum([part.samples for part in data.given])
    counts = np.bincount(np.searchsorted(ends, stream, side="right"), minlength=len(ends))
    return [int(count) for count in counts]


@FEW
@given(mixtures(), seeds, st.integers(1, 400))
def test_data_order_reads_whole_epochs_of_each_part(data: Parted, seed: int, count: int) -> None:
    """What is taken from a part is each of its samples once, then each once more, and so on."""
    stream = order_of(data, seed=seed).read(0, count).tolist()
    for part, found in zip(data.given, by_part(data, stream), strict=True):
        assert is_of_whole_epochs(found, part.samples)


@FEW
@given(mixtures(), seeds, st.integers(1, 50), st.lists(st.integers(1, 10**6), max_size=4), st.integers(1, 10**6))
def test_data_order_has_no_history(data: Parted, seed: int, batch: int, before: list[int], step: int) -> None:
    """What a step reads does not depend on the steps read before, and samples one by one are those of the step."""
    used = order_of(data, batch=batch, seed=seed)
    for other in before:
        used.samples(other)
    fresh = order_of(data, batch=batch, seed=seed)
    assert used.samples(step) == fresh.samples(step)
    first = (step - 1) * batch
    places = range(first, first + batch, 7)
    assert used.samples(step)[::7] == tuple(int(fresh.read(place, 1)[0]) for place in places)


@FEW
@given(mixtures(), seeds, st.integers(0, 3 * PERIOD), st.integers(1, 3000), st.integers(1, 300))
def test_data_order_reads_on_where_it_was(data: Parted, seed: int, first: int, before: int, count: int) -> None:
    """In the middle of any period each part is where the samples before leave it."""
    before = min(before, first)
    whole = by_part(data, order_of(data, seed=seed).read(first - before, before + count).tolist())
    rest = by_part(data, order_of(data, seed=seed).read(first, count).tolist())
    for all_of_it, end in zip(whole, rest, strict=True):
        assert all_of_it[len(all_of_it) - len(end) :] == end


def test_data_order_keeps_shares_exactly() -> None:
    """Over each period of 65,536 samples; within one they are as if drawn, and come in no pattern."""
    data = Parted(
        tuple(DataPart(name=name, samples=50, weight=by) for name, by in (("a", 5.0), ("b", 2.0), ("c", 1.0)))
    )
    order = order_of(data, seed=4)
    for period in (0, 1, 7, 10**9):
        stream = order.read(period * PERIOD, PERIOD).tolist()
        assert shares(data, stream) == [40960, 16384, 8192]
        thousand = shares(data, stream[:1000])
        assert thousand == pytest.approx([625, 250, 125], abs=60)
        assert thousand != [625, 250, 125]


@pytest.mark.parametrize("epochs", [(1.0, 1.0), (2.0, 0.5)])
def test_data_order_counts_epochs(epochs: tuple[float, float]) -> None:
    """A part that is to be read twice as often gives twice as many of its samples."""
    sizes = 6000, 2000
    data = Parted(
        tuple(
            DataPart(name=str(samples), samples=samples, epochs=by) for samples, by in zip(sizes, epochs, strict=True)
        )
    )
    wanted = [samples * by for samples, by in zip(sizes, epochs, strict=True)]
    assert shares(data, order_of(data).read(0, PERIOD).tolist()) == pytest.approx(
        [PERIOD * one / sum(wanted) for one in wanted], abs=1
    )


def test_data_order_takes_from_the_rarest_part() -> None:
    """A weight of a millionth has its one sample of a longer period; a smaller one is refused."""
    big, rare = DataPart(name="big", samples=1 << 20, weight=1.0), DataPart(name="rare", samples=9, weight=1e-6)
    data = Parted((big, rare))
    assert shares(data, order_of(data).read(5 << 20, 1 << 20).tolist()) == [(1 << 20) - 1, 1]
    text = r"data: expected weights of which none is less than 1/1048576 of their sum, got 1e-07 of 1 for rare\. Raise"
    with pytest.raises(ConfigError, match=text):
        order_of(Parted((big, DataPart(name="rare", samples=9, weight=1e-7))))


@FEW
@given(mixtures(least=2), seeds, st.lists(st.tuples(st.integers(1, 40), weights), min_size=1, max_size=4), st.data())
def test_data_order_resumes_each_part_under_new_weights(
    data: Parted, seed: int, later: list[tuple[int, float]], drawn: st.DataObject
) -> None:
    """No sample of an epoch is read twice or left out, whatever weights hold from which step on."""
    names = [part.name for part in data.given]
    steps = np.cumsum([1, *(step for step, _ in later)]).tolist()
    changes = [
        WeightChange(step=step, weights=dict(zip(names, drawn.draw(st.tuples(*[weights] * len(names))), strict=True)))
        for step in steps
    ]
    order = order_of(data, seed=seed, changes=changes)
    last = steps[-1] + 20
    stream = [sample for step in range(1, last) for sample in order.samples(step)]
    for part, found in zip(data.given, by_part(data, stream), strict=True):
        assert is_of_whole_epochs(found, part.samples)
    before = order_of(data, seed=seed, changes=changes[:-1])
    assert [before.samples(step) for step in range(1, steps[-1])] == [
        order.samples(step) for step in range(1, steps[-1])
    ]
    at = drawn.draw(st.integers(1, last - 1))
    assert order_of(data, seed=seed, changes=changes).samples(at) == tuple(stream[(at - 1) * 8 : at * 8])


def test_data_order_takes_new_shares_from_their_step_on() -> None:
    """And not before it; far behind it they are exact over each of its periods."""
    data = Parted((DataPart(name="a", samples=70, weight=1.0), DataPart(name="b", samples=30, weight=1.0)))
    order = order_of(data, batch=64).with_weights(11, {"a": 3.0, "b": 1.0})
    assert [change.step for change in order.changes] == [1, 11]
    assert order.with_weights(15, {"b": 2.0, "a": 6.0}) is order
    assert shares(data, order.read(640 + 5 * PERIOD, PERIOD).tolist()) == [49152, 16384]
    old, new = shares(data, order.read(0, 640).tolist()), shares(data, order.read(640, 640).tolist())
    assert old[0] < 400 < new[0]
    back = order.with_weights(11, {"a": 1.0, "b": 2.0})
    assert [change.step for change in back.changes] == [1, 11]


@FEW
@given(seeds, seeds)
def test_data_order_differs_by_seed(one: int, other: int) -> None:
    """Any two seeds give two orders, both of parts and of samples."""
    data = Parted(tuple(DataPart(name=name, samples=200, weight=1.0) for name in "ab"))
    first, second = (order_of(data, batch=200, seed=seed).samples(1) for seed in (one, other))
    assert (first == second) == (one == other)
    parts = [[sample < 200 for sample in samples] for samples in (first, second)]
    assert (parts[0] == parts[1]) == (one == other)


def test_data_order_differs_by_epoch_and_part() -> None:
    """Each epoch has its own order, and two parts of one size do not share theirs."""
    alone = order_of(single(100), batch=100)
    assert len({alone.samples(step) for step in range(1, 20)}) == 19
    data = Parted(tuple(DataPart(name=name, samples=100, epochs=1.0) for name in "ab"))
    one, other = by_part(data, order_of(data).read(0, 400).tolist())
    assert one[:100] != other[:100]


@FEW
@given(st.lists(st.integers(1, 9), min_size=1, max_size=60), seeds)
def test_data_order_reads_few_shards_at_a_time(sizes: list[int], seed: int) -> None:
    """One window's, and then never again in the epoch; windows are of about as many shards each."""
    samples = sum(sizes)
    shard_of = np.repeat(np.arange(len(sizes)), sizes)
    for epoch in (0, 5):
        stream = shard_of[order_of(single(samples, sizes), seed=seed).read(epoch * samples, samples)].tolist()
        last = {shard: place for place, shard in enumerate(stream)}
        begun = {shard: place for place, shard in reversed(list(enumerate(stream)))}
        for place in range(samples):
            assert sum(begun[shard] <= place <= last[shard] for shard in begun) <= WINDOW_SHARDS


def test_data_order_mixes_the_shards_of_a_window() -> None:
    """Of eight shards the first samples come from all; of many, those of the next epoch come from others."""
    order = order_of(single(800, [100] * 8))
    assert {sample // 100 for sample in order.read(0, 60).tolist()} == set(range(8))
    many = order_of(single(10_000, [10] * 1000))
    windows = [{sample // 10 for sample in many.read(epoch * 10_000, 60).tolist()} for epoch in range(3)]
    assert all(one != other for one, other in pairwise(windows))


def test_data_order_takes_no_memory_for_samples() -> None:
    """A billion samples take what a thousand take, in the billionth step too."""

    def peak(samples: int) -> int:
        tracemalloc.start()
        data = Parted((DataPart(name="a", samples=samples, weight=2.0), DataPart(name="b", samples=99, weight=1.0)))
        order = order_of(data, batch=64)
        for step in (1, 2, 10**9):
            order.samples(step)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(1000)
    few, many = peak(1000), peak(10**9)
    assert many < 1.02 * few + 4096


def test_data_order_is_fixed_for_good() -> None:
    """The order is the same with every numpy and on every machine: resumed runs rely on it."""
    data = Parted(
        (
            DataPart(name="a", samples=9, shards=(4, 0, 5), weight=2.0),
            DataPart(name="b", samples=5, weight=1.0),
            DataPart(name="c", samples=100, shards=(10,) * 10, weight=0.5),
        )
    )
    order = order_of(data, batch=12, seed=1234).with_weights(3, {"a": 1.0, "b": 1.0, "c": 3.0})
    assert [order.samples(step) for step in (1, 2, 3, 10**6)] == FIXED


FIXED = [
    (0, 10, 8, 6, 7, 91, 44, 29, 2, 4, 1, 27),
    (3, 5, 25, 8, 9, 101, 5, 1, 6, 4, 13, 3),
    (12, 7, 82, 100, 49, 80, 26, 30, 11, 2, 0, 12),
    (79, 107, 17, 96, 64, 62, 85, 49, 90, 92, 69, 67),
]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"global_batch": -1}, "global_batch: expected at least 0, got -1"),
        ({"seed": -1}, "seed: expected at least 0, got -1"),
        ({"version": 3}, "version: expected 1 or 2, got 3"),
        (
            {"changes": [WeightChange(step=2, weights={"": 1.0})]},
            r"changes: expected steps that ascend from 1, got \[2\]",
        ),
        ({"changes": [WeightChange(step=1, weights={"a": 1.0})]}, r"changes: expected weights of \[''\], got .*'a'"),
    ],
)
def test_data_order_refuses_what_can_not_be(given: dict[str, Any], message: str) -> None:
    """Numbers out of range, and weights of other parts, by name."""
    with pytest.raises(ValueError, match=message):
        SampleOrder.of(single(3), **{"global_batch": 1, "seed": 0, **given})


def test_data_order_counts_from_one() -> None:
    """There is no step 0, and no order of nothing."""
    with pytest.raises(ValueError, match="step: expected at least 1, got 0"):
        order_of(single(3)).samples(0)
    with pytest.raises(ValueError, match="samples: expected at least 1, got 0"):
        order_of(Parted(()))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([("a", {}), ("a", {})], "expected parts with names of their own, got a name twice"),
        ([("a", {"weight": 1.0}), ("b", {})], "expected weights of all parts, epochs of all, or none, got some"),
        ([("a", {"weight": 1.0}), ("b", {"epochs": 1.0})], "expected weights of all parts, epochs of all, or none"),
    ],
)
def test_data_parts_that_contradict_each_other_are_refused(parts: list[tuple[str, Any]], message: str) -> None:
    """By the class of the dataset."""
    data = Parted(tuple(DataPart(name=name, samples=1, **keys) for name, keys in parts))
    with pytest.raises(PluginError, match=f"parts of Parted: {message}"):
        order_of(data)


@pytest.mark.parametrize("keys", [{"samples": 0}, {"samples": 3, "shards": (1, 1)}, {"samples": 1, "weight": 0.0}])
def test_a_data_part_that_can_not_be_is_refused(keys: dict[str, Any]) -> None:
    """Without samples, with others than its shards have, or with no weight."""
    with pytest.raises(ValueError, match="part 'a': expected"):
        DataPart(name="a", **keys)
