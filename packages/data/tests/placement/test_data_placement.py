"""Where samples and items of a step are placed, by count and by cost."""

from __future__ import annotations

import hashlib
import random

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo.data import (
    EncoderLoads,
    Loads,
    PlacedMicrobatch,
    fed_lanes,
    in_whole_numbers,
    lane_costs,
    lane_rows,
    place_by_cost,
    place_by_count,
    step_cost,
)


@attrs.frozen(kw_only=True)
class Step:
    """A step to be placed."""

    language: Loads
    encoders: tuple[EncoderLoads, ...]
    microbatches: int
    micro_batch: int

    def by_cost(self) -> tuple[PlacedMicrobatch, ...]:
        """Place it by cost."""
        return place_by_cost(self.language, self.encoders, microbatches=self.microbatches, micro_batch=self.micro_batch)

    def by_count(self) -> tuple[PlacedMicrobatch, ...]:
        """Place it by count."""
        return place_by_count(
            self.language, self.encoders, microbatches=self.microbatches, micro_batch=self.micro_batch
        )

    def items(self, encoder: int, samples: tuple[int, ...]) -> list[int]:
        """Return the items of samples, sample by sample."""
        owners = self.encoders[encoder].samples.tolist()
        return [item for sample in samples for item, owner in enumerate(owners) if owner == sample]


def passes(microbatches: int, factor: int) -> tuple[tuple[int, ...], ...]:
    """Return passes over so many microbatches each."""
    return tuple(tuple(range(first, min(first + factor, microbatches))) for first in range(0, microbatches, factor))


def make_step(seed: int, *, even: bool = False) -> Step:
    """Draw a step of ragged samples, or of samples that are all the same."""
    rng = random.Random(seed)
    microbatches, micro_batch, lanes = rng.randint(1, 4), rng.randint(1, 4), rng.choice((1, 2, 3, 8))
    full = microbatches * micro_batch * lanes
    count = full if even else rng.choice((full, full, rng.randint(0, full)))
    text = [5 if even else rng.choice((0, 3, rng.randint(1, 60))) for _ in range(count)]
    drawn = []
    for _ in range(rng.randint(0, 2)):
        held = [1 if even else rng.choice((0, 0, rng.randint(1, 10))) for _ in range(count)]
        owners = [sample for sample, items in enumerate(held) for _ in range(items)]
        rows = [4 if even else rng.randint(0, 12) for _ in owners]
        for owner, size in zip(owners, rows, strict=True):
            text[owner] += size
        drawn.append((owners, rows))
    costs = in_whole_numbers(
        [[float(length * (1 + length / 100)) for length in text], *([size * 2.5 for size in rows] for _, rows in drawn)]
    )
    encoders = []
    for cost, (owners, rows) in zip(costs[1:], drawn, strict=True):
        own = lanes if even else rng.randint(1, 6)
        homes = tuple((lane,) if even else (lane * own // lanes,) * rng.randint(0, 1) for lane in range(lanes))
        encoders.append(
            EncoderLoads(
                costs=cost,
                rows=np.array(rows, dtype=np.int64),
                lanes=own,
                stages=rng.randint(1, 3),
                passes=passes(microbatches, rng.choice((1, 1, 2, 3))),
                samples=np.array(owners, dtype=np.int64),
                homes=homes,
            )
        )
    language = Loads(
        costs=costs[0],
        rows=np.array(text, dtype=np.int64),
        lanes=lanes,
        stages=rng.randint(1, 4),
        passes=passes(microbatches, 1),
    )
    return Step(language=language, encoders=tuple(encoders), microbatches=microbatches, micro_batch=micro_batch)


@given(st.integers(0, 10**6))
@settings(max_examples=150, deadline=None)
def test_placement_puts_every_sample_and_item_in_one_place(seed: int) -> None:
    """Each sample is in one microbatch on one lane, and each of its items on one lane of its encoder."""
    step = make_step(seed)
    for placed in (step.by_cost(), step.by_count()):
        assert len(placed) == step.microbatches
        assert sorted(sample for one in placed for sample in one.samples) == list(range(len(step.language.costs)))
        for one in placed:
            assert one.owners.lanes == step.language.lanes
            assert one.owners.bounds[-1] == len(one.samples)
            for number, owners in enumerate(one.items):
                assert owners.lanes == step.encoders[number].lanes
                assert owners.bounds[-1] == len(step.items(number, one.samples))


@given(st.integers(0, 10**6))
@settings(max_examples=150, deadline=None)
def test_placement_by_cost_is_never_worse_nor_larger(seed: int) -> None:
    """A step costs at most what it does by count, and no lane has more rows than the fullest one by count."""
    step = make_step(seed)
    placed, even = step.by_cost(), step.by_count()
    language, encoders = step.language, step.encoders
    assert step_cost(language, encoders, placed) <= step_cost(language, encoders, even)
    for number in range(-1, len(encoders)):
        rows, limit = (lane_rows(language, encoders, found, number) for found in (placed, even))
        assert max(map(max, rows)) <= max(map(max, limit))


@given(st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_placement_sums_are_those_of_the_lanes(seed: int) -> None:
    """What lanes cost, and which language lanes they feed, is counted as if item by item."""
    step = make_step(seed)
    for placed in (step.by_cost(), step.by_count()):
        for number, encoder in enumerate(step.encoders):
            expected, fed = [[0] * encoder.lanes for _ in encoder.passes], set()
            for sums, served in zip(expected, encoder.passes, strict=True):
                for index in served:
                    one = placed[index]
                    for position, item in enumerate(step.items(number, one.samples)):
                        lane = one.items[number].lane_of(position)
                        sums[lane] += int(encoder.costs[item])
                        fed.add((lane, one.owners.lane_of(one.samples.index(encoder.samples[item]))))
            assert lane_costs(step.language, step.encoders, placed, number) == expected
            assert fed_lanes(step.language, step.encoders, placed, number) == sorted(fed)


@given(st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_placement_is_a_function_of_sizes(seed: int) -> None:
    """The same sizes are placed the same, however often."""
    assert make_step(seed).by_cost() == make_step(seed).by_cost()


@given(st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_placement_by_cost_leaves_what_is_even_where_it_is(seed: int) -> None:
    """Samples that cost the same stay in order, their items with them: nothing moves for nothing."""
    step = make_step(seed, even=True)
    assert step.by_cost() == step.by_count()


def test_placement_looks_for_nothing_better_than_even(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all lanes have the same to do in all passes; one sample that costs more is enough to look."""
    language = Loads(costs=np.full(8, 5), rows=np.full(8, 3), lanes=2, stages=1, passes=passes(2, 1))
    encoder = EncoderLoads(
        costs=np.full(8, 2),
        rows=np.ones(8, np.int64),
        lanes=2,
        stages=1,
        passes=passes(2, 2),
        samples=np.arange(8),
        homes=((), ()),
    )
    asked: list[int] = []

    def noted(_costs: object, _rows: object, bins: int, **_bounds: object) -> None:
        asked.append(bins)

    monkeypatch.setattr("mimo.data.placement.placement.partition", noted)
    step = Step(language=language, encoders=(encoder,), microbatches=2, micro_batch=2)
    assert step.by_cost() == step.by_count()
    assert not asked
    language.costs[3] = 6
    assert step.by_cost() == step.by_count()
    assert asked == [4]


def test_placement_keeps_items_at_home_where_nothing_is_gained() -> None:
    """Of two lanes with the same to do, each keeps its own; from a lane with too much as little moves as helps."""
    costs = np.array([6, 6, 6, 6, 6, 6, 6, 6], dtype=np.int64)
    encoder = EncoderLoads(
        costs=costs,
        rows=np.ones(8, dtype=np.int64),
        lanes=2,
        stages=1,
        passes=((0,),),
        samples=np.array([0, 0, 0, 0, 0, 0, 1, 1]),
        homes=((0,), (1,)),
    )
    language = Loads(costs=np.array([9, 8], dtype=np.int64), rows=np.array([6, 2]), lanes=2, stages=1, passes=((0,),))
    (placed,) = place_by_cost(language, [encoder], microbatches=1, micro_batch=1)
    assert placed.samples == (0, 1)
    assert [placed.items[0].lane_of(item) for item in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert lane_costs(language, [encoder], (placed,), 0) == [[24, 24]]


def test_placement_lets_large_samples_wait_for_one_another() -> None:
    """Of text alone, one sample a lane, those that are long share microbatches: the others needn't wait for them."""
    lengths = [90, 5, 5, 90, 90, 5, 5, 90]
    language = Loads(costs=np.array(lengths), rows=np.array(lengths), lanes=2, stages=1, passes=passes(4, 1))
    step = Step(language=language, encoders=(), microbatches=4, micro_batch=1)
    assert [{lengths[sample] for sample in one.samples} for one in step.by_cost()] == [{90}, {90}, {5}, {5}]
    assert (step_cost(language, (), step.by_cost()), step_cost(language, (), step.by_count())) == (190, 360)


@pytest.mark.parametrize(("stages", "turn"), [(1, [12, 5, 5, 5]), (2, [5, 12, 5, 5]), (3, [5, 5, 12, 5])])
def test_placement_fills_lanes_that_wait_for_a_large_sample(stages: int, turn: list[int]) -> None:
    """They get as much as it takes, all others less; it comes when a pipeline is full, with shorter ones around it."""
    lengths = [12, *(1,) * 42]
    language = Loads(costs=np.array(lengths), rows=np.array(lengths), lanes=2, stages=stages, passes=passes(4, 1))
    found = place_by_cost(language, (), microbatches=4, micro_batch=8)
    assert [max(lanes) for lanes in lane_costs(language, (), found)] == turn
    assert sorted(lane_costs(language, (), found)[turn.index(12)]) == [12, 12]


def test_placement_of_ragged_samples_is_nearly_even() -> None:
    """Text alone in a third of samples, else up to ten pictures: the slowest lanes are at most a few percent over."""
    rng = random.Random(5)
    held = [0 if rng.random() < 0.35 else rng.randint(1, 10) for _ in range(4 * 8 * 4)]
    text = [rng.randint(20, 400) + 64 * items for items in held]
    language_costs, costs = in_whole_numbers([[7.0 * one for one in text], [64.0] * sum(held)])
    served = passes(4, 1)
    language = Loads(costs=language_costs, rows=np.array(text), lanes=8, stages=1, passes=served)
    encoder = EncoderLoads(
        costs=costs,
        rows=np.full(len(costs), 64),
        lanes=8,
        stages=1,
        passes=served,
        samples=np.repeat(np.arange(len(held)), held),
        homes=((),) * 8,
    )
    step = Step(language=language, encoders=(encoder,), microbatches=4, micro_batch=4)

    def slowest(placed: tuple[PlacedMicrobatch, ...], number: int) -> float:
        found = lane_costs(language, [encoder], placed, number)
        return float(np.mean([max(lanes) / np.mean(lanes) for lanes in found]))

    assert slowest(step.by_count(), 0) > 1.4
    assert slowest(step.by_cost(), 0) < 1.1
    assert slowest(step.by_count(), -1) > 1.2
    assert slowest(step.by_cost(), -1) < 1.04


@pytest.mark.parametrize(
    ("side", "expected"),
    [(0, "56b6fb16eebdd7b3"), (1, "1776fc4be90bd543"), (37, "65fa3eba751019d1")],
)
def test_placement_is_the_same_everywhere(side: int, expected: str) -> None:
    """Every platform places a step in the same way: pictures of one size, of none that cost, of many.

    Lanes of text alone hold as many rows as memory has room for, so that some exchanges don't fit; of two encoders one
    has its rows at home.
    """
    lanes, microbatches, micro_batch = 24, 4, 6
    numbers = np.arange(lanes * microbatches * micro_batch)
    held = numbers * 7919 % 1009 % 9
    samples = np.repeat(numbers, held)
    pictures = np.arange(len(samples)) * 104_729 % 10_007
    rows = 40 + pictures % side * 3 if side else np.zeros_like(samples)
    text = 1 + numbers * 15_485_863 % 611 + np.bincount(samples, weights=rows, minlength=len(numbers)).astype(np.int64)
    language = Loads(costs=text * (900 + text), rows=text, lanes=lanes, stages=2, passes=passes(microbatches, 1))
    encoders = [
        EncoderLoads(
            costs=rows * (50 + rows),
            rows=rows,
            lanes=own,
            stages=1,
            passes=passes(microbatches, factor),
            samples=samples,
            homes=homes,
        )
        for own, factor, homes in ((32, 1, ((),) * lanes), (lanes, 2, tuple((lane,) for lane in range(lanes))))
    ]
    placed = place_by_cost(language, encoders, microbatches=microbatches, micro_batch=micro_batch)
    assert placed != place_by_count(language, encoders, microbatches=microbatches, micro_batch=micro_batch)
    found = [(one.samples, [(own.bounds, own.order) for own in (one.owners, *one.items)]) for one in placed]
    assert hashlib.sha256(repr(found).encode()).hexdigest()[:16] == expected
