"""Evaluation: the held-out samples through the training path, without backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import attrs
import torch

from mimo.data import Dataset
from mimo.hooks import EvaluationInfo
from mimo.launch import Heartbeat
from mimo.optimizer.runtime import LocalStats, ReducedStats
from mimo.trainer.batch.digest import check_length, difference
from mimo.trainer.batch.route_cache import RouteCache
from mimo.trainer.batch.step_data import StepData
from mimo.trainer.batch.step_loader import StepLoader
from mimo.trainer.job.job import Job
from mimo.trainer.step.plan_runner import PlanRunner
from mimo.trainer.step.programs.loss_terms import term_losses
from mimo.trainer.step.programs.predictions import Prediction


class MakeLoader(Protocol):
    """Makes what reads batches by their numbers on a rank."""

    def __call__(self, cut: Callable[[int], StepData], *, reach: int, last: int) -> StepLoader:
        """Return it; see `StepLoader`."""


@attrs.frozen(kw_only=True)
class Evaluation:
    """Result of one evaluation.

    Args:
        info: what all ranks agree on.
        predictions: for the samples that this rank has scored; other ranks have those of other samples.
        has_first: whether the first samples are among them.
    """

    info: EvaluationInfo
    predictions: tuple[Prediction, ...]
    has_first: bool


@attrs.frozen(kw_only=True)
class Evaluator:
    """Evaluates a job on one rank; call it on every rank of the world.

    Args:
        job: the same on every rank.
        rank: this process.
        device: where this rank computes.
        runner: runs plans.
        digest: of samples returns what ranks compare.
        reduce: sums over all ranks.
        routes: found in earlier batches.
        make_loader: makes what reads the batches.
        progress: where this rank reports what it does.
    """

    job: Job
    rank: int
    device: torch.device
    runner: PlanRunner
    digest: Callable[[StepData], tuple[int, ...] | None]
    reduce: Callable[[LocalStats], ReducedStats]
    routes: RouteCache
    make_loader: MakeLoader
    progress: Heartbeat

    @torch.no_grad()
    def run(self, step: int) -> Evaluation | None:
        """Evaluate the weights after ``step``; None where nothing is held out.

        Raises:
            DataError: ranks do not hold the same samples, or not equally many.
        """
        job = self.job
        if job.evaluation is None:
            return None
        check_length(len(job.evaluation), where="evaluation", device=self.device)
        if not len(job.evaluation):
            return None
        share, predictions = LocalStats(), list[Prediction]()
        batches = [*_batches(job.evaluation, job.evaluation_batch)]
        loader = self.make_loader(partial(self._cut, job.evaluation, batches), reach=1, last=len(batches) - 1)
        with contextlib.closing(loader):
            for number, samples in enumerate(batches):
                share += self.runner.evaluate(self._compared(loader, number, samples))
                predictions += [prediction for program in self.runner.programs for prediction in program.predictions]
        sums = self.reduce(share)
        info = EvaluationInfo(
            step=step,
            loss=sums.loss / sums.divisor,
            exact_match=sums.counts["right"] / max(sums.counts["samples"], 1),
            samples=sums.counts["samples"],
            losses=term_losses(job, sums),
        )
        has_first = bool(predictions) and job.graph.role(self.rank).places[job.language.name].dp == 0
        return Evaluation(info=info, predictions=tuple(predictions), has_first=has_first)

    def _cut(self, dataset: Dataset, batches: Sequence[Sequence[int]], number: int) -> StepData:
        microbatches = self.job.evaluation_microbatches
        return StepData.cut(self.job, dataset, batches[number], microbatches=microbatches, routes=self.routes)

    def _compared(self, loader: StepLoader, number: int, samples: Sequence[int]) -> StepData:
        """Return a batch, after all ranks have compared its samples."""
        with self.progress.within(f"{self.progress.doing}, reading samples {samples[0]} to {samples[-1]}"):
            data = loader.load(number)
            digest = self.digest(data)
        if not self.reduce(LocalStats(digest=digest)).digests_equal:
            where = f"evaluation from sample {samples[0]} on"
            raise difference(self.job, self.job.evaluation, data, where=where, device=self.device)
        return data


def _batches(dataset: Dataset, size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(dataset), size):
        yield range(start, min(start + size, len(dataset)))
