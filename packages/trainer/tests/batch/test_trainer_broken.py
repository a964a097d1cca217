"""Samples that can't be decoded are marked as all ranks agree, reported once, and end the run beyond a share."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from mimo.data import PlacedItem, SampleLayout
from mimo.hooks import DataError, ItemInfo, RunError, UserError
from mimo.topology import Grid
from mimo.trainer.batch.broken import FAULTS, BrokenSamples
from mimo.trainer.batch.microbatch import Microbatch
from mimo.trainer.batch.step_data import StepData

SAMPLES = 20
GRID = Grid(name="vision", ranks=(0,))
MODULE: Any = SimpleNamespace(
    name="vision",
    modality="image",
    feeds=("language",),
    feeds_language=True,
    distil=None,
    is_of_teacher=False,
    is_generator=False,
    grid=GRID,
    prefetch=False,
)
AHEAD: Any = SimpleNamespace(
    name="vision",
    modality="image",
    feeds=("language",),
    feeds_language=True,
    distil=None,
    is_of_teacher=False,
    is_generator=False,
    grid=GRID,
    prefetch=True,
)


@attrs.frozen(kw_only=True)
class Ahead:
    """An item that was prepared ahead, or could not be."""

    error: Exception | None = None

    def wait(self) -> Exception | None:
        """Return why it is not there."""
        return self.error

    def take(self) -> dict[str, torch.Tensor]:
        """Return it."""
        if self.error is not None:
            raise self.error
        return {}


def lay_out(_dataset: object, sample: int) -> SampleLayout:
    """Return a sample of three tokens, of which the first two are rows of an item each."""
    infos = (ItemInfo(sample=sample, index=index, modality="image", size=(1, 1)) for index in range(2))
    items = tuple(PlacedItem(info=info, runs=((info.index, info.index + 1),)) for info in infos)
    ids = np.array([1, 2, 3])
    return SampleLayout(sample=sample, tokens=ids, labels=ids, items=items, truncated=False)


class Lines:
    """A dataset that knows where its samples are."""

    def __len__(self) -> int:
        return SAMPLES

    def where(self, sample: int) -> str:
        """Return where a sample comes from."""
        return f"train.jsonl:{sample + 1}"


def make_job(share: float) -> Any:
    """Return what of a job matters here."""
    settings = SimpleNamespace(data=SimpleNamespace(max_broken=share, hand_on=1))
    return SimpleNamespace(
        settings=settings,
        train=Lines(),
        lay_out_all=lambda dataset, samples: [lay_out(dataset, sample) for sample in samples],
        item_modules=(MODULE,),
        language=MODULE,
    )


def step_of(job: Any, numbers: list[int], broken: set[int]) -> StepData:
    """Return a step of two microbatches whose items have been prepared ahead, but for the first of some samples."""
    microbatches = (Microbatch(job, job.train, numbers[:2]), Microbatch(job, job.train, numbers[2:]))
    waiting = iter([(number, index) for number in numbers for index in range(2)])

    def submit(_prepare: object) -> Ahead:
        number, index = next(waiting)
        is_torn = number in broken and index == 0
        return Ahead(error=torn(job.train.where(number)) if is_torn else None)

    for microbatch in microbatches:
        microbatch.prepare_ahead(MODULE, GRID.coordinates(0), submit)
    return StepData(make=lambda: [(microbatches[0], (0, 1)), (microbatches[1], (2, 3))])


def torn(where: str) -> DataError:
    """Return why an item can't be decoded."""
    return DataError(where, expected="a picture", got="half of one")


def broken_of(job: Any, *, module: Any = MODULE, rank: int = 0, elsewhere: Any = None) -> BrokenSamples:
    """Return what is under test on a rank; another one says ``elsewhere``."""
    others = [] if elsewhere is None else [elsewhere]
    return BrokenSamples(
        job, [(module, GRID.coordinates(0))], rank=rank, gather=lambda value: json.loads(json.dumps([value, *others]))
    )


def found_in(broken: BrokenSamples, step: int, data: StepData) -> UserError | None:
    """Return why a run ends at a step, when another rank has found something too."""
    sums = {FAULTS: broken.find(step, data)[FAULTS] + 1}
    return broken.agree(step, data, None, sums, identical=True)


ELSEWHERE = {
    "fault": None,
    "broken": [[1, 1, {"where": "train.jsonl:9", "expected": "a picture", "got": "a hole", "fix": ""}]],
}


def test_only_the_item_that_any_rank_finds_broken_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Its sample weighs nothing and keeps its tokens, rows and other items; the first rank reports all of them."""
    job = make_job(0.5)
    broken, data = broken_of(job, elsewhere=ELSEWHERE), step_of(job, [7, 8, 9, 3], {9})
    assert found_in(broken, 1, data) is None
    assert data.broken == {1: (1,), 2: (0,)}
    layouts = [layout for microbatch in data.microbatches for layout in microbatch.layouts]
    assert [None if layout.weights is None else layout.weights.tolist() for layout in layouts] == [
        *(None, [0, 0, 0]),
        *([0, 0, 0], None),
    ]
    assert [[item.is_broken for item in layout.items] for layout in layouts] == [
        *([False, False], [False, True]),
        *([True, False], [False, False]),
    ]
    assert capsys.readouterr().err == (
        "mimo: step 1 leaves out a sample. train.jsonl:9: expected a picture, got a hole.\n"
        "mimo: step 1 leaves out a sample. train.jsonl:10: expected a picture, got half of one.\n"
    )
    assert found_in(broken_of(job, elsewhere=ELSEWHERE, rank=1), 1, step_of(job, [7, 8, 9, 3], {9})) is None
    assert capsys.readouterr().err == ""


def test_a_sample_is_reported_and_counted_once(capsys: pytest.CaptureFixture[str]) -> None:
    """It may come again in the next epoch."""
    job = make_job(0.05)
    broken = broken_of(job)
    for step in (1, 2):
        data = step_of(job, [7, 8, 9, 3], {9})
        assert broken.agree(step, data, None, broken.find(step, data), identical=True) is None
        assert data.broken == {2: (0,)}
    assert capsys.readouterr().err.count("train.jsonl:10") == 1


def test_one_sample_more_than_the_share_ends_the_run() -> None:
    """With its place and the number that may be, on all ranks, whoever has found it."""
    job = make_job(0.05)
    broken = broken_of(job, elsewhere=ELSEWHERE)
    assert found_in(broken, 1, step_of(job, [7, 8, 9, 3], set())) is None
    assert str(found_in(broken, 2, step_of(job, [4, 5, 6, 2], set()))) == (
        "train.jsonl:6: expected items that can be decoded, in all but 1 of 20 samples, as data.max_broken = 0.05 "
        "says, got the second sample without. Mend or remove the items, or raise data.max_broken."
    )


def test_a_run_that_resumes_counts_on(capsys: pytest.CaptureFixture[str]) -> None:
    """What was left out before counts against the share, and is not reported again; the new one is named."""
    job = make_job(0.05)
    broken, data = broken_of(job), step_of(job, [7, 9, 8, 9], {7, 9})
    broken.known.update([7])
    fault = found_in(broken, 5, data)
    assert str(fault).startswith("train.jsonl:10: expected items that can be decoded, in all but 1 of 20 samples")
    assert "got the second sample without" in str(fault)
    assert capsys.readouterr().err == ""


def test_nothing_is_waited_for_where_the_first_broken_item_ends_the_run() -> None:
    """As it is by default: the step that needs it finds it."""
    job = make_job(0.0)
    broken, data = broken_of(job), step_of(job, [7, 8, 9, 3], {9})
    assert broken.find(1, data)[FAULTS].item() == 0
    assert broken.agree(1, data, None, {FAULTS: torch.zeros(1)}, identical=True) is None
    assert data.broken == {}


def test_a_broken_item_that_would_be_encoded_a_step_ahead_is_found_before() -> None:
    """Unless it may be left out, it is the fault of its step."""
    data = step_of(make_job(0.0), [7, 8, 9, 3], {9})
    with pytest.raises(DataError, match=r"train.jsonl:10: expected a picture, got half of one"):
        broken_of(make_job(0.0), module=AHEAD).find(1, data)


def test_a_fault_of_one_rank_is_that_of_all() -> None:
    """Who has one keeps its own; where samples differ, which is said otherwise, broken items are not looked up."""
    job, data = make_job(0.5), step_of(make_job(0.5), [7, 8, 9, 3], {9})
    sums, own = {FAULTS: torch.ones(1)}, RunError("train.jsonl:1", expected="a disk", got="none")
    elsewhere = {
        "fault": {"where": "train.jsonl:2", "expected": "text", "got": "none", "fix": "Mend it."},
        "broken": [],
    }
    said = broken_of(job, elsewhere=elsewhere).agree(1, data, None, sums, identical=True)
    assert isinstance(said, DataError)
    assert str(said) == "train.jsonl:2: expected text, got none. Mend it."
    assert broken_of(job, elsewhere=elsewhere).agree(1, data, own, sums, identical=True) is own
    assert broken_of(job, elsewhere=ELSEWHERE).agree(1, data, None, sums, identical=False) is None
    assert data.broken == {}
