"""Samples that can't be decoded are marked as all ranks agree, reported once, and end the run beyond a share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from mimo.data import PlacedItem, SampleLayout
from mimo.hooks import DataError, ItemInfo
from mimo.topology import Grid
from mimo.trainer.batch.broken import BROKEN, BrokenSamples, broken_sums
from mimo.trainer.batch.microbatch import Microbatch
from mimo.trainer.batch.step_data import StepData

SAMPLES = 20
GRID = Grid(name="vision", ranks=(0,))
MODULE: Any = SimpleNamespace(name="vision", modality="image", grid=GRID)


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
    """Return a sample of three tokens, of which the first is an item's row."""
    item = PlacedItem(info=ItemInfo(sample=sample, index=0, modality="image", size=(1, 1)), start=0, rows=1)
    ids = np.array([1, 2, 3])
    return SampleLayout(sample=sample, tokens=ids, labels=ids, items=(item,), truncated=False)


class Lines:
    """A dataset that knows where its samples are."""

    def __len__(self) -> int:
        return SAMPLES

    def where(self, sample: int) -> str:
        """Return where a sample comes from."""
        return f"train.jsonl:{sample + 1}"


def make_job(share: float) -> Any:
    """Return what of a job matters here."""
    data = SimpleNamespace(max_broken=share, hand_on=1)
    settings = SimpleNamespace(data=data, most_samples=4)
    return SimpleNamespace(settings=settings, train=Lines(), lay_out=lay_out, encoders=(MODULE,), language=MODULE)


def step_of(job: Any, numbers: list[int], broken: set[int]) -> StepData:
    """Return a step of two microbatches whose items have been prepared ahead, but for some."""
    microbatches = (Microbatch(job, job.train, numbers[:2]), Microbatch(job, job.train, numbers[2:]))
    waiting = iter(numbers)

    def submit(_prepare: object) -> Ahead:
        number = next(waiting)
        where = job.train.where(number)
        return Ahead(error=DataError(where, expected="a picture", got="half of one") if number in broken else None)

    for microbatch in microbatches:
        microbatch.prepare_ahead(MODULE, GRID.coordinates(0), submit)
    return StepData(make=lambda: [(microbatches[0], (0, 1)), (microbatches[1], (2, 3))])


def test_samples_that_any_rank_finds_broken_count_for_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """They keep their tokens and rows; who has found one says where it is, and others nothing."""
    job = make_job(0.5)
    broken, data = BrokenSamples(job, [(MODULE, GRID.coordinates(0))]), step_of(job, [7, 8, 9, 3], {9})
    share = broken.find(1, data)
    assert share[BROKEN].tolist() == [0, 0, 1, 0]
    elsewhere = torch.tensor([0.0, 2.0, 0.0, 0.0])
    assert broken.mark(1, data, {BROKEN: share[BROKEN] + elsewhere}) is None
    assert data.broken == (1, 2)
    layouts = [layout for microbatch in data.microbatches for layout in microbatch.layouts]
    assert [None if layout.weights is None else layout.weights.tolist() for layout in layouts] == [
        *(None, [0, 0, 0]),
        *([0, 0, 0], None),
    ]
    assert [[item.is_broken for item in layout.items] for layout in layouts] == [[False], [True], [True], [False]]
    said = capsys.readouterr().err
    assert said == ("mimo: step 1 leaves out a sample. train.jsonl:10: expected a picture, got half of one.\n")


def test_a_sample_is_reported_and_counted_once(capsys: pytest.CaptureFixture[str]) -> None:
    """It may come again in the next epoch."""
    job = make_job(0.05)
    broken = BrokenSamples(job, [(MODULE, GRID.coordinates(0))])
    for step in (1, 2):
        data = step_of(job, [7, 8, 9, 3], {9})
        assert broken.mark(step, data, broken.find(step, data)) is None
        assert data.broken == (2,)
    assert capsys.readouterr().err.count("train.jsonl:10") == 1


def test_one_sample_more_than_the_share_ends_the_run() -> None:
    """With its place and the number that may be, on all ranks, whoever has found it."""
    job = make_job(0.05)
    broken = BrokenSamples(job, [])
    first, second = step_of(job, [7, 8, 9, 3], set()), step_of(job, [4, 5, 6, 2], set())
    assert broken.mark(1, first, {BROKEN: torch.tensor([0.0, 0.0, 1.0, 0.0])}) is None
    fault = broken.mark(2, second, {BROKEN: torch.tensor([0.0, 1.0, 0.0, 0.0])})
    assert str(fault) == (
        "train.jsonl:6: expected items that can be decoded, in all but 1 of 20 samples, as data.max_broken = 0.05 "
        "says, got the second sample without. Mend or remove the items, or raise data.max_broken."
    )


def test_a_run_that_resumes_counts_on(capsys: pytest.CaptureFixture[str]) -> None:
    """What was left out before counts against the share, and is not reported again; the new one is named."""
    job = make_job(0.05)
    broken, data = BrokenSamples(job, [(MODULE, GRID.coordinates(0))]), step_of(job, [7, 9, 8, 9], {7, 9})
    broken.known.update([7])
    fault = broken.mark(5, data, broken.find(5, data))
    assert str(fault).startswith("train.jsonl:10: expected items that can be decoded, in all but 1 of 20 samples")
    assert "got the second sample without" in str(fault)
    assert capsys.readouterr().err == ""


def test_nothing_is_sent_or_waited_for_where_the_first_broken_item_ends_the_run() -> None:
    """As it is by default."""
    job = make_job(0.0)
    broken, data = BrokenSamples(job, [(MODULE, GRID.coordinates(0))]), step_of(job, [7, 8, 9, 3], {9})
    assert broken_sums(job) == broken.extra_sums == {}
    assert broken.find(1, data) == {}
    assert broken.mark(1, data, {}) is None
    assert data.broken == ()
