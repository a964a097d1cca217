"""Ranks that hold other data than the rest: nothing of the step is sent, and both sides are named."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch
from jobs import CPU, make_job
from synthetic import HELD_OUT
from tables import table

from mimo.data import Dataset
from mimo.hooks import DataError
from mimo.launch import ProcessInfo
from mimo.launch.runtime import launch
from mimo.testing import Pool
from mimo.trainer import Trainer

MODULES = {"vision": {"ranks": [0, 1], "dp": 2}, "language": {"ranks": [1, 2, 3], "dp": 1, "pp": 3}}
BOTH = (
    r"edge vision->language: expected the same samples at both ends; sample {at} of the step is the first that "
    r"differs, got sample \d+ \(\d+ tokens, \d+ of them rows of encoders\) on rank 0 of vision, and "
    r"sample {other} \(\d+ tokens, \d+ of them rows of encoders\) on rank 1 of language\. Give the machines"
)


@attrs.frozen
class Swapped:
    """The order of a rank that takes another sample ``at`` one place of one step."""

    inner: Any
    step: int
    at: int
    other: int

    def samples(self, step: int) -> Sequence[int]:
        """Return the samples of ``step``."""
        found = list(self.inner.samples(step))
        if step == self.step:
            found[self.at] = self.other
        return found


@attrs.frozen
class Longer:
    """The dataset of a rank whose file holds a longer text in one sample."""

    inner: Dataset
    sample: int

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        """Return what the true dataset has."""
        return getattr(self.inner, name)

    def tokens(self, sample: int) -> Sequence[int]:
        """Return ids, two more of one sample."""
        found = list(self.inner.tokens(sample))
        return [found[0], found[0], *found] if sample == self.sample else found


@attrs.frozen
class Heavier(Longer):
    """The dataset of a rank whose file gives one sample weights."""

    def tokens(self, sample: int) -> Sequence[int]:
        """Return ids."""
        return self.inner.tokens(sample)

    def weights(self, sample: int) -> Sequence[float] | None:
        """Return weights of one sample."""
        return [2.0] * len(self.tokens(sample)) if sample == self.sample else None


@attrs.frozen
class Unreadable(Longer):
    """The dataset of a rank whose file has a bad line."""

    def tokens(self, sample: int) -> Sequence[int]:
        """Return ids, unless the line is bad."""
        if sample == self.sample:
            raise DataError("line 7", expected="text", got="none")
        return self.inner.tokens(sample)


def swapped(rank: int, *, step: int, wrong: int = 1) -> Trainer:
    """Return this rank's trainer; that of rank ``wrong`` takes sample 95 as the third of ``step``."""
    trainer = Trainer(make_job(table(MODULES, microbatches=4)), rank=rank, device=CPU)
    if rank == wrong:
        trainer.samples.order = Swapped(trainer.samples.order, step=step, at=2, other=95)  # type: ignore[assignment]
    return trainer


def run_steps(rank: int) -> list[str]:
    """Return the errors of four trainers whose samples differ: at step 1, at step 2, in a sample's text and weights."""
    found = []
    with pytest.raises(DataError) as raised:
        swapped(rank, step=1).train(1)
    found.append(str(raised.value))
    trainer = swapped(rank, step=2)
    trainer.train(1)
    with pytest.raises(DataError) as raised:
        trainer.train(2)
    found.append(str(raised.value))
    for other in (Longer, Heavier):
        trainer = Trainer(make_job(table(MODULES, microbatches=4)), rank=rank, device=CPU)
        sample = trainer.samples.numbers(1)[5]
        if rank == 1:
            assert trainer.job.train is not None
            trainer.job = attrs.evolve(trainer.job, train=other(trainer.job.train, sample))
        with pytest.raises(DataError) as raised:
            trainer.train(1)
        found.append(str(raised.value))
    return found


def test_ends_of_an_edge_that_hold_other_samples_are_both_named_on_every_rank(pool: Pool) -> None:
    """At the first step or a later one, by number or by content: the same words everywhere, before anything is sent."""
    first, second, text, weights = zip(*pool.run(4, run_steps), strict=True)
    for messages, step, at in ((first, 1, 3), (second, 2, 3), (text, 1, 6), (weights, 1, 6)):
        assert len(set(messages)) == 1
        expected = f"step {step}, " + BOTH.replace("{at}", str(at)).replace("{other}", "95" if at == 3 else r"\d+")
        assert re.match(expected, messages[0]), messages[0]


@attrs.frozen
class Shorter(Longer):
    """The dataset of a rank whose file lacks the last samples."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.sample


def run_unreadable(rank: int) -> None:
    """Train where one sample of the second step cannot be read, on one rank or on all."""
    for ranks in ((0, 1, 2, 3), (2,)):
        trainer = Trainer(make_job(table(MODULES, microbatches=4)), rank=rank, device=CPU)
        if rank in ranks:
            assert trainer.job.train is not None
            sample = trainer.samples.numbers(2)[0]
            trainer.job = attrs.evolve(trainer.job, train=Unreadable(trainer.job.train, sample))
        assert math.isfinite(trainer.train(1).loss)
        if rank in ranks:
            with pytest.raises(DataError, match="line 7"):
                trainer.train(2)


def test_what_cannot_be_read_ends_the_step_that_needs_it(pool: Pool) -> None:
    """The step before, in which it is looked at already, is done and may be saved."""
    pool.run(4, run_unreadable)


def run_evaluation(rank: int) -> None:
    """Evaluate where one rank's held-out data is another."""
    trainer = Trainer(make_job(table(MODULES, microbatches=4)), rank=rank, device=CPU)
    assert trainer.evaluate(1) is not None
    if rank == 3:
        assert trainer.job.evaluation is not None
        trainer.job = attrs.evolve(trainer.job, evaluation=Longer(trainer.job.evaluation, 27))
    with pytest.raises(DataError, match=r"evaluation from sample 24 on, edge language\.1-2: expected the same samples"):
        trainer.evaluate(1)


def test_evaluation_looks_too(pool: Pool) -> None:
    """Also where only stages of one module differ."""
    pool.run(4, run_evaluation)


def run_short_evaluation(rank: int, length: int) -> None:
    """Evaluate where one rank holds fewer samples."""
    trainer = Trainer(make_job(table(MODULES, microbatches=4)), rank=rank, device=CPU)
    if rank == 3:
        assert trainer.job.evaluation is not None
        trainer.job = attrs.evolve(trainer.job, evaluation=Shorter(trainer.job.evaluation, length))
    message = rf"^evaluation: expected equally many .* got {HELD_OUT} on rank 0, and {length} on"
    with pytest.raises(DataError, match=message):
        trainer.evaluate(1)


@pytest.mark.each("length")
@pytest.mark.parametrize("length", [HELD_OUT - 1, 24, 0])
def test_evaluation_counts_samples_first(length: int, pool: Pool) -> None:
    """One less in the last batch, a batch less, none at all: ranks would not do as many batches, or as long ones."""
    pool.run(4, run_short_evaluation, length)


def train_swapped(process: ProcessInfo) -> None:
    """Train two steps as one rank of a launched run, of which rank 2 differs at the second."""
    torch.set_num_threads(1)
    trainer = swapped(process.rank, step=2, wrong=2)
    trainer.train(1)
    trainer.train(2)


def test_every_rank_stops_with_exit_code_3(capfd: pytest.CaptureFixture[str]) -> None:
    """A run ends with the code of a failure at run time, and says once what differs where."""
    assert launch(train_swapped, world=4) == 3
    message = capfd.readouterr().err
    assert message.count("expected the same samples at both ends") == 1
    assert "step 2, edge language.0-1" in message
    assert "sample 95" in message
