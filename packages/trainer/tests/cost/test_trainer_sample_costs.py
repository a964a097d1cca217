"""What samples and items cost, and how evenly lanes share a step by that."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from eye import Table, make_job, on, table

from mimo.data import NO_LABEL, PlacedItem, SampleLayout
from mimo.hooks import DataError, ItemInfo
from mimo.schedule import Costs, simulate
from mimo.trainer.batch.balance import balance_of, step_balance, step_seconds
from mimo.trainer.batch.digest import digest_of
from mimo.trainer.batch.step_data import StepData
from mimo.trainer.cost.operations import module_operations
from mimo.trainer.cost.sample_costs import SampleCosts, sample_costs
from mimo.trainer.cost.sample_stats import SampleStats
from mimo.trainer.cost.step_sizes import StepSizes, check_placed
from mimo.trainer.job.job import Job


def settings(**sections: Table) -> Table:
    """Return those of two encoder lanes on the ranks of two language lanes."""
    return table({"vision": on(0, 1), "language": on(0, 1)}, **sections)


def layout(sample: int, length: int, items: int) -> SampleLayout:
    """Return a sample of so many tokens, of which the first ones are items of one row."""
    return SampleLayout(
        sample=sample,
        tokens=np.zeros(length, dtype=np.int64),
        labels=np.full(length, NO_LABEL),
        items=tuple(
            PlacedItem(
                info=ItemInfo(sample=sample, index=index, modality="image", size=(1, 1)), runs=((index, index + 1),)
            )
            for index in range(items)
        ),
        truncated=False,
    )


def sample_cost(job: Job, length: int, labels: int) -> float:
    """Return what one sample costs the language model."""
    (found,) = SampleCosts(job).samples(np.array([length]), np.array([labels])).tolist()
    return float(found)


@pytest.mark.parametrize("length", [1, 17, 255, 256, 700, 4097, 60_000])
def test_samples_cost_what_the_formula_says(length: int) -> None:
    """Long ones by a line between two lengths, within a ten-thousandth; every label costs the same."""
    job = make_job(settings())
    labels = length // 3
    done = module_operations(job, "language", SampleStats(lengths=(length,), labels=labels, sizes={}))
    assert sample_cost(job, length, labels) == pytest.approx(done.forward + done.backward, rel=1e-4)
    assert sample_cost(job, 0, 0) == 0


def test_samples_cost_the_same_whatever_is_beside_them() -> None:
    """Each of many is what it is alone, to the bit, in any order: ranks that read other steps before agree."""
    job = make_job(settings())
    lengths = np.array([700, 3, 0, 4097, 700, 256, 60_000, 255, 3])
    labels = np.arange(9)
    costs = SampleCosts(job)
    expected = [
        sample_cost(job, length, label) for length, label in zip(lengths.tolist(), labels.tolist(), strict=True)
    ]
    assert costs.samples(lengths, labels).tolist() == expected
    assert costs.samples(lengths[::-1], labels[::-1]).tolist() == expected[::-1]
    assert costs.samples(lengths[:0], labels[:0]).tolist() == []


def test_items_without_a_formula_cost_by_rows() -> None:
    """Each as much as a token of the language model; nothing is built to find out."""
    job = make_job(settings())
    assert job.module("vision").spec.flops is None
    assert SampleCosts(job).item(job.module("vision"), (1, 1)) == sample_cost(job, 1, 0) > 0


def test_ranks_of_a_lane_share_its_cost() -> None:
    """Tensor and context ranks divide a sample's operations."""
    alone, shared = (make_job(table({"language": language})) for language in (on(0, 1), on(0, 7, dp=2, tp=2, cp=2)))
    assert sample_cost(shared, 100, 30) == pytest.approx(sample_cost(alone, 100, 30) / 4)


def test_samples_that_are_not_as_the_index_says_are_refused() -> None:
    """What it says of an item that isn't there would be placed on a lane that has none."""
    job = make_job(settings())
    layouts = [layout(sample, 8, 2) for sample in range(24)]
    (placed, *_) = SampleCosts(job).place(StepSizes.of_layouts(job, layouts))
    check_placed(job, placed, layouts[:8], "data:1")
    with pytest.raises(DataError, match=r"8 samples from data:1: expected 16 items .*'image'.*, got 15"):
        check_placed(job, placed, [*layouts[:7], layout(7, 8, 1)], "data:1")


def test_a_step_placed_on_other_lanes_has_another_digest() -> None:
    """Of the same samples, so that no rank waits for what another one sends elsewhere."""
    job = make_job(settings())
    assert job.train is not None
    costs = SampleCosts(job)
    cut = partial(StepData.of_step, job, job.train, lambda: range(24))
    found = [cut(costs=costs), cut(costs=costs), cut(costs=None)]
    layouts = [layout(sample, 8 + sample, 1 + sample % 3) for sample in range(24)]
    first, *_ = costs.place(StepSizes.of_layouts(job, layouts))
    other = cut(costs=costs)
    other.microbatches[0].placed = first
    digests = [digest_of(one) for one in (*found, other)]
    assert digests[0] == digests[1] != digests[2]
    assert digests[3] not in digests[:3]


def test_one_place_needs_no_costs() -> None:
    """A job with a single lane and microbatch, or by count, reads no sample before it has to."""
    alone = table({"language": on(0, 0)}, run={"micro_batch": 24})
    assert sample_costs(make_job(alone)) is None
    assert sample_costs(make_job(settings(data={"balance": "count"}))) is None
    assert sample_costs(make_job(settings())) is not None


def test_balance_is_that_of_the_slowest_lanes() -> None:
    """Of 3 microbatches of 4 samples for each of 2 lanes, in which one sample in four has all the items."""
    job = make_job(settings())
    layouts = [layout(sample, 8, 8 if sample % 8 == 0 else 0) for sample in range(24)]
    found = balance_of(job, StepSizes.of_layouts(job, layouts), SampleCosts(job))
    assert found["count"].slowest("vision") == pytest.approx(2.0)
    assert found["cost"].slowest("vision") == pytest.approx(1.0)
    assert found["count"].loads("language") == found["cost"].loads("language") == pytest.approx((1.0,) * 3)
    assert step_balance(job, 1)["count"].slowest("vision") == pytest.approx(1.0)


def test_a_step_is_simulated_as_its_slowest_lanes_take_it() -> None:
    """Twice the time of what waits for lanes with twice as much to do; as without, where all have the same."""
    job = make_job(settings())
    layouts = [layout(sample, 8, 8 if sample % 8 == 0 else 0) for sample in range(24)]
    found = balance_of(job, StepSizes.of_layouts(job, layouts), SampleCosts(job))
    costs = Costs.even(job.graph)
    even = simulate(job.plan, job.graph, costs).seconds
    assert step_seconds(job, costs, found["cost"]) == pytest.approx(even)
    assert step_seconds(job, costs, found["count"]) == pytest.approx(1.5 * even)


@pytest.mark.parametrize(("tp", "groups", "slowest", "seconds"), [(1, 2, 1.0, 1.0), (2, 1, 2.0, 1.5)])
def test_lanes_that_do_not_wait_for_each_other_add_up_what_they_do(
    tp: int, groups: int, slowest: float, seconds: float
) -> None:
    """Of 4 microbatches the first lane of the encoder has all items, then the second, and so on.

    Each feeds its own language lane, and both are done at the same time; one that both feed waits for the slower one.
    """
    run = {"name": "r", "steps": 1, "global_batch": 32, "micro_batch": 4 * tp}
    job = make_job(table({"vision": on(0, 1), "language": on(0, 1, tp=tp)}, run=run))
    layouts = [layout(sample, 8, 8 if sample // 4 % 2 == sample // 8 % 2 else 0) for sample in range(32)]
    found = balance_of(job, StepSizes.of_layouts(job, layouts), SampleCosts(job))["count"]
    assert len(found.groups) == groups
    assert found.slowest("vision") == pytest.approx(slowest)
    assert found.loads("vision") == pytest.approx((2.0,) * 4)
    costs = Costs.even(job.graph)
    assert step_seconds(job, costs, found) == pytest.approx(seconds * simulate(job.plan, job.graph, costs).seconds)
