"""Steps by tokens: they follow from order and lengths alone, are resumed where they were, and have plans on file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from jobs import CPU, make_job
from numpy.typing import NDArray
from resuming import begin
from tables import Table
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from mimo.data import SampleSize, SampleSizes
from mimo.hooks import ConfigError, DataError
from mimo.model.runtime import Attention
from mimo.schedule import Costs, plans_from_json, plans_to_json, simulate
from mimo.testing import Pool
from mimo.trainer import Job, Trainer
from mimo.trainer.runtime import (
    KeptSamples,
    SampleCosts,
    StepData,
    StepSamples,
    StepSizes,
    balance_of,
    save_step,
    step_seconds,
)

STEPS = 6
SIZES = {"short": 14, "long": 9}


@pytest.fixture
def settings(tmp_path: Path) -> Table:
    """Return the settings of a run over two sources, one of which has longer texts."""
    for name, samples in SIZES.items():
        words = 1 if name == "short" else 6
        lines = (json.dumps({"text": f"{name} {number}" * words}) for number in range(samples))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    sources = {name: {"plugin": "jsonl", "path": str(tmp_path / f"{name}.jsonl"), "weight": 1.0} for name in SIZES}
    config = {"hidden": 8, "layers": 2, "heads": 1, "intermediate": 8}
    return {
        "run": {
            "name": "tokens",
            "directory": str(tmp_path / "run"),
            "steps": STEPS,
            "seed": 3,
            "batch_tokens": 200,
            "micro_tokens": 64,
        },
        "data": {"plugin": "mixture", "max_tokens": 64, "sources": sources},
        "modules": {"language": {"plugin": "decoder", "ranks": [0], "config": config}},
    }


def on(settings: Table, lanes: int, **more: Any) -> Table:
    """Return settings with so many language lanes, and other keys of ``[run]``."""
    language = {**settings["modules"]["language"], "ranks": list(range(lanes))}
    return {**settings, "run": {**settings["run"], **more}, "modules": {"language": language}}


def weighted(settings: Table, weight: float) -> Table:
    """Return settings with another weight of the long texts."""
    sources = settings["data"]["sources"]
    sources = {**sources, "long": {**sources["long"], "weight": weight}}
    return {**settings, "data": {**settings["data"], "sources": sources}}


def run(rank: int, settings: Table, first: int, last: int) -> list[tuple[int, tuple[int, ...], float]]:
    """Train some steps, and return of each its microbatches, samples and loss; the last one is saved."""
    trainer, _, state = begin(rank, settings, settings["run"]["directory"] if first > 1 else "")
    found = []
    for step in range(first, last + 1):
        info = trainer.train(step)
        numbers = trainer.samples.numbers(step)
        assert info.samples == len(numbers)
        found.append((len(trainer.data.microbatches), numbers, info.loss))
    save_step(trainer, state, [], last)
    return found


RAGGED_STEPS = 20


def rows_of_layers(rank: int, settings: Table) -> list[int]:
    """Train some steps; return how many rows each call of attention in the language model had, of those with any."""
    trainer, _, _ = begin(rank, settings, "")
    found: list[int] = []

    def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, Attention) and len(inputs[0]):
            found.append(len(inputs[0]))

    with register_module_forward_pre_hook(note):
        for step in range(1, RAGGED_STEPS + 1):
            trainer.train(step)
    return found


def test_ragged_microbatches_come_in_as_few_sizes_as_their_rows_are_rounded_to(settings: Table, pool: Pool) -> None:
    """One, where the multiple is that of the longest; a quarter of it makes four at most, and no rounding many."""
    most = settings["run"]["micro_tokens"]
    sizes = {}
    for multiple in (1, most // 4, most):
        rounded = on(settings, 1, steps=RAGGED_STEPS)
        rounded["modules"]["language"]["round_rows"] = multiple
        (sizes[multiple],) = pool.run(1, rows_of_layers, rounded)
        assert len(sizes[multiple]) >= RAGGED_STEPS
    assert len(set(sizes[1])) > 4
    assert {*sizes[most // 4]} <= {most // 4, most // 2, most * 3 // 4, most}
    assert set(sizes[most]) == {most}


def test_a_run_resumes_at_its_cursor_on_other_lanes_and_with_other_microbatches(settings: Table, pool: Pool) -> None:
    """It reads what a run without a break reads, up to where the weights of its sources change, and learns the same."""
    (whole,) = pool.run(1, run, settings, 1, STEPS)
    parts = [
        (on(settings, 3), 1, 2),
        (on(settings, 1, micro_tokens=100), 3, 3),
        (weighted(on(settings, 2, micro_tokens=80), 3.0), 4, 5),
        (weighted(on(settings, 1), 3.0), 6, 6),
    ]
    found = []
    for table, first, last in parts:
        found += pool.run(len(table["modules"]["language"]["ranks"]), run, table, first, last)[0]
    assert [numbers for _, numbers, _ in found[:3]] == [numbers for _, numbers, _ in whole[:3]]
    assert [loss for _, _, loss in found[:3]] == pytest.approx([loss for _, _, loss in whole[:3]], rel=1e-5)
    order = make_job(settings).sample_order()
    changed = order.with_weights(4, {"short": 1.0, "long": 3.0}, position=sum(len(it) for _, it, _ in found[:3]))
    stream = [sample for _, numbers, _ in found for sample in numbers]
    assert stream == changed.read(0, len(stream)).tolist()
    assert len({len(numbers) for _, numbers, _ in whole}) > 1
    assert len({microbatches for microbatches, _, _ in found}) > 1


def run_resumed(rank: int, settings: Table) -> str:
    """Return the summary of what a run has resumed."""
    return begin(rank, settings, settings["run"]["directory"])[1]


def test_a_resumed_run_says_that_its_steps_have_more_tokens(settings: Table, pool: Pool) -> None:
    """As that changes what it learns; tokens of a microbatch don't, and nothing is said of them."""
    pool.run(1, run, settings, 1, 1)
    (same,) = pool.run(1, run_resumed, on(settings, 1, micro_tokens=100))
    assert "tokens" not in same
    (changed,) = pool.run(1, run_resumed, on(settings, 1, batch_tokens=300))
    assert "run.batch_tokens 300 (was 200)" in changed


def run_again(rank: int, settings: Table) -> tuple[float, float]:
    """Return this rank's losses of a step and of the same samples, kept and cut again."""
    trainer = Trainer(make_job(settings), rank=rank, device=CPU)
    first = trainer.accumulate(1)
    kept = KeptSamples(numbers=trainer.samples.numbers(1), base=trainer.job.train)
    return float(first.loss), float(trainer.repeat(trainer.cut(kept)).loss)


def test_a_step_that_is_run_again_has_the_same_microbatches(settings: Table, pool: Pool) -> None:
    """To the bit, from the samples that were kept of it."""
    for first, again in pool.run(2, run_again, on(settings, 2)):
        assert first == again != 0


@attrs.frozen(kw_only=True, eq=False)
class Indexed:
    """A dataset of which lengths are known, but for some samples, and nothing is read where all are."""

    job: Job
    unknown: frozenset[int] = frozenset()

    def __len__(self) -> int:
        assert self.job.train is not None
        return len(self.job.train)

    def __getattr__(self, name: str) -> Any:
        """Read what the index lacks."""
        if not self.unknown:
            raise AttributeError(name)
        return getattr(self.job.train, name)

    def sizes(self, samples: Sequence[int] | NDArray[np.int64]) -> SampleSizes | None:
        """Return what an index says, if it has all of them."""
        assert self.job.train is not None
        if self.unknown.intersection(map(int, samples)):
            return None
        layouts = [self.job.lay_out(self.job.train, int(sample)) for sample in samples]
        return SampleSizes.of(
            (), [SampleSize(tokens=len(it.tokens), ids=0, targets=0, weight=0, cut=it.truncated) for it in layouts]
        )


@pytest.mark.parametrize("longer", ["cut", "drop"])
def test_steps_follow_from_an_index_without_reading(settings: Table, longer: str) -> None:
    """They are the same as without one; a step that was passed is found again."""
    settings["data"] |= {"longer": longer, "max_tokens": 30}
    job = make_job(settings)
    read = StepSamples(job, job.sample_order())
    indexed: Any = Indexed(job=job)
    known = StepSamples(attrs.evolve(job, train=indexed), job.sample_order())
    steps = range(1, 100)
    assert [known.numbers(step) for step in steps] == [read.numbers(step) for step in steps]
    assert [known.dropped(step) for step in (1, 2, 3)] == [read.dropped(step) for step in (1, 2, 3)]
    assert any(map(read.dropped, steps)) == (longer == "drop")
    assert read.position(100) == sum(len(read.numbers(step)) + read.dropped(step) for step in steps)


def test_no_layouts_are_held_where_some_sources_have_an_index(settings: Table) -> None:
    """Steps whose own samples all have one are placed by it, though those read beside them were laid out."""
    job = make_job(settings)
    indexed: Any = Indexed(job=job, unknown=frozenset({SIZES["short"] + 1}))
    samples = StepSamples(attrs.evolve(job, train=indexed), job.sample_order())
    for step in range(1, 60):
        numbers = partial(samples.numbers, step)
        data = StepData.of_step(job, indexed, numbers, costs=None, known=samples.take_layout)
        assert data.microbatches
    assert sum(samples.take_layout(sample) is not None for sample in range(len(indexed))) <= 1


def test_a_step_takes_as_long_in_more_microbatches(settings: Table) -> None:
    """What its microbatches cost is counted by what is in them, not by how many there are."""
    job = make_job(settings)
    assert job.train is not None
    costs, whole, samples = SampleCosts(job), Costs.even(job.graph), StepSamples(job, job.sample_order())
    even, counts = simulate(job.plan, job.graph, whole).seconds, set()
    for step in range(1, 10):
        sizes = StepSizes.of(job, job.train, samples.numbers(step))
        for balance in balance_of(job, sizes, costs).values():
            counts.add(balance.microbatches)
            assert step_seconds(job, whole, balance) == pytest.approx(even)
    assert len(counts) > 1


def test_all_plans_stand_in_one_file(settings: Table) -> None:
    """One for each number of microbatches."""
    job = make_job(on(settings, 2))
    assert [plan.microbatches for plan in job.plans] == [2, 3, 4]
    assert plans_from_json(plans_to_json(job.plans)) == job.plans
    assert plans_from_json(plans_to_json(job.plans[:1])) == job.plans[:1]
    assert plans_to_json(job.plans[:1]) == job.plan.to_json()


def test_a_schedule_gets_numbers_of_microbatches_that_it_has_plans_for(settings: Table) -> None:
    """The next ones, where it has none."""
    table = on(settings, 2)
    table["modules"]["language"] |= {"pp": 2, "chunks": 2, "config": {"hidden": 8, "layers": 4, "heads": 1}}
    job = make_job({**table, "schedule": {"plugin": "interleaved"}})
    assert [plan.microbatches for plan in job.plans] == [4, 6, 8]


@pytest.mark.parametrize(
    ("run_keys", "data_keys", "text"),
    [
        ({"batch_tokens": 0, "micro_tokens": 0}, {}, "run.global_batch: expected 1 or more, got 0"),
        ({"global_batch": 4}, {}, "run.batch_tokens: expected 0 beside global_batch, as a step takes so many samples"),
        ({"micro_tokens": 0}, {}, r"run.micro_tokens: expected from 1 to batch_tokens = 200, .*, got 0"),
        ({"micro_tokens": 300}, {}, r"run.micro_tokens: expected from 1 to batch_tokens = 200, .*, got 300"),
        (
            {"global_batch": 4, "batch_tokens": 0},
            {},
            "run.micro_tokens: expected 0 where batch_tokens is, got 64. Set micro_batch instead.",
        ),
        ({"micro_tokens": 63}, {}, "data.max_tokens: expected at most run.micro_tokens = 63, as a sample lies in one"),
        (
            {"global_batch": 4, "batch_tokens": 0, "micro_tokens": 0},
            {"longer": "drop"},
            "data.longer: expected 'cut' or 'refuse' with run.global_batch, by which each step has as many samples",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: Table, run_keys: Table, data_keys: Table, text: str
) -> None:
    """Before anything is started."""
    settings["run"] |= run_keys
    settings["data"] |= data_keys
    with pytest.raises(ConfigError, match=f"^{text}"):
        make_job(settings)


def test_samples_that_are_too_long_end_the_run_where_that_is_set(settings: Table) -> None:
    """With their place; and so do data of which nothing is short enough."""
    settings["data"] |= {"longer": "refuse", "max_tokens": 20}
    job = make_job(settings)
    with pytest.raises(
        DataError, match=r"^\S*long.jsonl:\d+: expected at most data.max_tokens = 20 tokens, .* got more"
    ):
        list(map(StepSamples(job, job.sample_order()).numbers, range(1, 4)))
    settings["data"] |= {"longer": "drop", "max_tokens": 2}
    job = make_job(settings)
    with pytest.raises(DataError, match=r"^data.longer: expected samples of at most data.max_tokens = 2 tokens"):
        StepSamples(job, job.sample_order()).numbers(1)
