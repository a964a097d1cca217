"""What samples and items cost, and how evenly lanes share a step by that."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import torch.distributed as dist
from eye import Table, find, make_job, on, table

from mimo.data import NO_LABEL, Dataset, PlacedItem, SampleLayout
from mimo.hooks import DataError, ItemInfo, Kind
from mimo.model import ENCODERS, OpCost
from mimo.schedule import Costs, simulate
from mimo.trainer.batch.balance import balance_of, step_balance, step_seconds
from mimo.trainer.batch.digest import difference, digest_of
from mimo.trainer.batch.step_data import StepData
from mimo.trainer.config.toml import make_settings
from mimo.trainer.cost.operations import module_operations
from mimo.trainer.cost.profile import VERSION, EdgeTimes, LinearTime, Profile, StageTimes, digest, layout_of, machine
from mimo.trainer.cost.sample_costs import SampleCosts, sample_costs
from mimo.trainer.cost.sample_stats import SampleStats
from mimo.trainer.cost.step_sizes import StepSizes, check_placed
from mimo.trainer.job.job import Job
from mimo.trainer.job.measured_dataset import MeasuredDataset
from mimo.trainer.resolving.resolve import resolve


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


def find_with_formula(kind: Kind[Any], name: str, where: str) -> Any:
    """Find the small model's plugins, an encoder that says what its items take among them."""
    found = find(kind, name, where)
    return attrs.evolve(found, flops=flops_of_eye) if kind is ENCODERS else found


def flops_of_eye(
    _config: Any, width: int, _stage: object, _recompute: object, sizes: Sequence[Any]
) -> dict[str, OpCost]:
    """Return what a projector of items takes."""
    return {"projector": OpCost(weighted=16.0 * len(sizes) * width, weights=8 * width)}


def measured(folder: Path, **seconds: float) -> tuple[float, float]:
    """Return what an item and a sample cost by a profile in which passes of these modules take so many seconds."""
    job = resolve(make_settings(settings()), find=find_with_formula)
    times = {name: LinearTime(fixed=0.25 * each, sample=each) for name, each in seconds.items()}
    profile = Profile(
        version=VERSION,
        machine=machine("cpu", "2"),
        settings=digest(job),
        micro_batch=job.settings.run.micro_batch,
        modules=layout_of(job),
        stages=tuple(
            StageTimes(
                module=stage.module,
                stage=stage.stage,
                forward=times[stage.module],
                backward=times[stage.module],
                input_gradient=times[stage.module],
                weight_gradient=times[stage.module],
            )
            for stage in job.graph.stages
        ),
        edges=tuple(EdgeTimes(name=edge.name, bytes=10) for edge in job.graph.edges),
    )
    path = folder / "costs.json"
    path.write_text(profile.to_json())
    job = resolve(make_settings(settings(schedule={"profile": str(path)})), find=find_with_formula)
    return SampleCosts(job).item(job.module("vision"), (1, 1)), sample_cost(job, 700, 33)


def test_costs_follow_what_a_profile_measured(tmp_path: Path) -> None:
    """A module that took three times as long costs three times as much, and another one as much as before."""
    item, sample = measured(tmp_path, vision=0.5, language=2.0)
    assert min(item, sample) > 0
    assert measured(tmp_path, vision=1.5, language=2.0) == pytest.approx((3 * item, sample))
    assert measured(tmp_path, vision=0.5, language=6.0) == pytest.approx((item, 3 * sample))


COMMANDS = [(False, "mimo data index FILE"), (True, "mimo data index FILE --tokens")]
"""Whether ids are kept, and what makes the index anew."""


def indexed(job: Job, *, keeps_tokens: bool) -> Dataset:
    """Return the samples of a job with an index of them."""
    assert job.train is not None
    known: Any = SimpleNamespace(keeps_tokens=keeps_tokens)
    return MeasuredDataset(job.train, {}, known)


@pytest.mark.parametrize(("keeps", "command"), COMMANDS)
def test_samples_that_are_not_as_the_index_says_are_refused(keeps: bool, command: str) -> None:
    """What it says of an item that isn't there would be placed on a lane that has none; ids that are kept stay."""
    job = make_job(settings())
    dataset = indexed(job, keeps_tokens=keeps)
    layouts = [layout(sample, 8, 2) for sample in range(24)]
    (placed, *_) = SampleCosts(job).place(StepSizes.of_layouts(job, layouts))
    check_placed(job, placed, layouts[:8], dataset)
    wanted = rf"8 samples from {dataset.where(0)}: expected 16 items .*'image'.*, got 15\. Run `{command}` again\.$"
    with pytest.raises(DataError, match=wanted):
        check_placed(job, placed, [*layouts[:7], layout(7, 8, 1)], dataset)


@pytest.mark.parametrize(("keeps", "command"), COMMANDS)
def test_samples_that_ranks_place_otherwise_need_the_same_index(keeps: bool, command: str, tmp_path: Path) -> None:
    """Where the samples are the same ones; it is made anew with the ids that it keeps."""
    job = make_job(table({"vision": on(0, 0), "language": on(0, 0)}))
    assert job.train is not None
    data = StepData.of_step(job, job.train, lambda: range(24), costs=None)
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    try:
        found = difference(job, indexed(job, keeps_tokens=keeps), data, where="step 1", device=torch.device("cpu"))
    finally:
        dist.destroy_process_group()
    assert found.got == "the same samples, placed by sizes that differ"
    assert found.fix == f"Give all machines the same index of the data; run `{command}` again."


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
