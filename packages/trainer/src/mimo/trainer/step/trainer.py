"""One training step on one rank: cut samples, run the plan, reduce, agree, update."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import partial
from typing import TypeAlias

import attrs
import torch
import torch.distributed as dist

from mimo.hooks import ConfigError, EvaluationInfo, StateTree, StepInfo
from mimo.launch import Heartbeat
from mimo.launch.runtime import join_alone
from mimo.model import LanguageModelSpec
from mimo.model.runtime import check_backend
from mimo.optimizer.runtime import LocalStats, ReducedStats, StepDecision, StepResult, agree
from mimo.schedule import Plan
from mimo.schedule.runtime import Record
from mimo.trainer.batch.broken import FAULT_SUMS, BrokenSamples
from mimo.trainer.batch.digest import difference, digest_of
from mimo.trainer.batch.lookahead import BatchLookahead, PendingBatch
from mimo.trainer.batch.route_cache import RouteCache
from mimo.trainer.batch.saved_samples import KeptSamples
from mimo.trainer.batch.step_data import StepData
from mimo.trainer.batch.step_loader import StepLoader
from mimo.trainer.batch.step_samples import StepSamples
from mimo.trainer.cost.sample_costs import sample_costs
from mimo.trainer.items.staging import Staging
from mimo.trainer.job.compilation import compile_backend
from mimo.trainer.job.job import Job
from mimo.trainer.job.precision import set_numerics
from mimo.trainer.memory.labels import held_tensors
from mimo.trainer.memory.report import MemoryReport
from mimo.trainer.step.build import RankParts
from mimo.trainer.step.evaluator import Evaluation, Evaluator
from mimo.trainer.step.plan_runner import PlanProgress, PlanRunner, check_plans
from mimo.trainer.step.probe import PASSES, StepProbe, computations
from mimo.trainer.step.programs.item_program import places_of
from mimo.trainer.step.programs.loss_terms import term_sums
from mimo.trainer.step.programs.program import COUNTS
from mimo.trainer.step.step_info import StepReport, add_up_memory
from mimo.trainer.step.tracing import Tracer
from mimo.trainer.step.traffic import TrafficReport

Decide: TypeAlias = Callable[[int, Record | None], StepDecision]
"""Runs forward and backward of a step, by whatever number of runs, and returns what all ranks have agreed on."""


@attrs.frozen(kw_only=True)
class StepOutcome:
    """What one step gives.

    Args:
        info: for plugins, the same on all ranks.
        stops: whether any rank has been asked to stop after it.
    """

    info: StepInfo
    stops: bool


class Trainer:
    """Trains a job on one rank, a step at a time.

    Make one on every rank of the world, after ``torch.distributed.init_process_group``; one process alone needs no
    group. All ranks call the same methods in the same order::

        trainer = Trainer(job)
        for step in range(1, 101):
            info = trainer.train(step)
        evaluation = trainer.evaluate(100)

    Args:
        job: the same on every rank.
        rank: this process; None: its rank in the default group.
        device: where this rank computes.
        parts: makes this rank's model, optimizer, programs and the ends of its edges.
        progress: where this rank reports what it does.
        probe: records what this rank computes while it trains; None for none.
        objects: see `ProcessInfo`.

    Raises:
        ConfigError: the job has several ranks, and there is no process group.
        PlanError: ranks have made different plans.

    Attributes:
        model: this rank's modules.
        optimizer: steps them together with all other ranks.
        heartbeat: says that this rank still works, for work that takes long outside of a step; for the main thread.
    """

    def __init__(
        self,
        job: Job,
        *,
        rank: int | None = None,
        device: torch.device | str = "cpu",
        parts: type[RankParts] = RankParts,
        progress: Heartbeat | None = None,
        probe: StepProbe | None = None,
        objects: dist.ProcessGroup | None = None,
    ) -> None:
        rank, device = _own_rank(job, device) if rank is None else rank, torch.device(device)
        self.job, self.rank, self.device, self.objects = job, rank, device, objects
        set_numerics(job.settings.run)
        check_backend(compile_backend(job.settings.run), device)
        self._progress = progress or Heartbeat()
        self.heartbeat = self._progress.resume
        self._costs = sample_costs(job)
        placed_by = "" if self._costs is None else self._costs.scales_text
        check_plans((*job.plans, job.evaluation_plan), device=device, costs=placed_by)
        traffic = TrafficReport(job, rank=rank, device=device)
        self._report = StepReport(job, traffic=traffic, device=device)
        self._tracer = Tracer(job, rank=rank, device=device, objects=objects)
        # With or without a probe: another length of the message could change the order in which its sums are taken.
        sums = {**self._report.extra_sums, PASSES: len(computations(job.model_graph)), **FAULT_SUMS}
        on_plan = PlanProgress(self._progress, job.graph.stage_ranks)
        self.parts = parts(job, rank=rank, device=device, extra_sums=sums, progress=on_plan, probe=probe)
        self.model, self.optimizer = self.parts.model, self.parts.optimizer
        self._optimizer_bytes = add_up_memory(job, self.optimizer, device=device)
        labels = partial(held_tensors, self.model, self.optimizer)
        self._memory = MemoryReport(job, rank=rank, device=device, labels=labels, objects=objects)
        self._runner = PlanRunner(job, self.parts, rank=rank, traffic=traffic, probe=probe, progress=on_plan)
        self.programs = self._runner.programs
        self.holds_modules = bool(job.graph.role(rank).places)
        self._samples = None if job.train is None else StepSamples(job, job.sample_order())
        self._routes = RouteCache()
        self._broken = BrokenSamples(job, places_of(self.programs), rank=rank)
        data = job.settings.data
        self._staging = Staging.to(device, ahead_bytes=data.ahead_bytes) if data.workers else None
        reach = 1 + self._runner.prefetches
        self._loader = self._make_loader(self._cut, reach=reach, last=job.settings.run.steps)
        self._lookahead = BatchLookahead(
            cut=self._loader.load,
            digest=self._digest,
            broken=self._broken,
            agree=self._reduce,
            reach=reach,
            last=job.settings.run.steps,
            progress=self._progress,
        )
        self._last: tuple[PendingBatch, PendingBatch | None] | None = None
        """The samples of the step that was run last, and of the one after it."""

    def train(self, step: int) -> StepInfo:
        """Do one step on every rank: forward, backward, reduction, agreement, update."""
        return self.take(step, self.decide).info

    def take(self, step: int, decide: Decide) -> StepOutcome:
        """Do one step, of which ``decide`` runs forward and backward: `decide`, or what wraps it."""
        record = self._tracer.begin(step)
        start = time.perf_counter()
        with self._memory.measured(record):
            decision = decide(step, record)
        result = self.apply(step, decision)
        seconds = time.perf_counter() - start
        plan, phase = self._runner.plan, self._runner.phase
        self._tracer.end(step, record, plan, phase)
        info = self._report.of(
            step,
            result,
            self.data,
            dropped=self.samples.dropped(step),
            seconds=seconds,
            optimizer_bytes=self._optimizer_bytes,
            memory=self._memory.of(step, plan, phase),
        )
        return StepOutcome(info=info, stops=result.agreed.stops > 0)

    def decide(self, step: int, record: Record | None = None) -> StepDecision:
        """Run forward and backward of a step, and agree with all ranks on whether and how to update."""
        return self.optimizer.propose(self.accumulate(step, record))

    def accumulate(self, step: int, record: Record | None = None) -> LocalStats:
        """Run forward and backward of a step; gradients are then summed over it, and not yet divided by anything.

        Args:
            step: which.
            record: takes down when each action was done.

        Returns:
            This rank's share of what the step adds up to, with the digest of a later step's samples.

        Raises:
            DataError: ranks do not hold the same samples, or they can't be read; nothing of the step has been sent.
        """
        batch, following = self._lookahead.batches(step)
        if batch.fault is not None:
            raise batch.fault
        if not batch.identical:
            raise difference(self.job, self.job.train, batch.data, where=f"step {step}", device=self.device)
        return self._then_read(step, self._run(batch, following, record))

    def apply(self, step: int, decision: StepDecision) -> StepResult:
        """Update every module by what all ranks have agreed on, or skip the step on all ranks."""
        result = self.optimizer.apply(step, decision)
        self._lookahead.confirm(result.agreed)
        language = self.job.language
        assert isinstance(language.spec, LanguageModelSpec)
        if language.spec.experts is not None and not result.skipped:
            counts = {name: result.agreed.extra_sums[name] for name in language.spec.aux_losses(language.config).counts}
            for part in self.model.parts_of(language.name):
                language.spec.experts.after_step(part.module, counts)
        return result

    def update(self, step: int, share: LocalStats) -> StepResult:
        """Agree with all ranks on what `accumulate` has returned, and update every module, or skip on all ranks."""
        return self.apply(step, self.optimizer.propose(share))

    def repeat(self, data: StepData | None = None) -> LocalStats:
        """Run the last step once more, as `accumulate` did: from its own samples, or from the same read again.

        What was made ahead for it is made again, and so is what it makes ahead.
        """
        assert self._last is not None
        batch, following = self._last
        share = self._run(batch if data is None else attrs.evolve(batch, data=data), following, None)
        return share + self._lookahead.compared

    def replay(self, step: int, data: StepData) -> LocalStats:
        """Run a step as `accumulate` does, from samples that nobody compares; nothing is made ahead for the next."""
        share = self._run(PendingBatch(step=step, data=data, share=LocalStats()), None, None)
        return self._then_read(step, share)

    def close(self) -> None:
        """End the threads that read ahead. A trainer that is dropped does so too."""
        self._loader.close()

    def evaluate(self, step: int) -> EvaluationInfo | None:
        """Run the held-out samples through the same path without backward; None where there are none.

        Raises:
            DataError: ranks do not hold the same samples, or not equally many.
        """
        evaluation = self.evaluate_with_predictions(step)
        return None if evaluation is None else evaluation.info

    def evaluate_with_predictions(self, step: int) -> Evaluation | None:
        """Do as `evaluate`, and return too what the model predicts for the samples that this rank scores."""
        return Evaluator(
            job=self.job,
            rank=self.rank,
            device=self.device,
            runner=self._runner,
            digest=self._digest,
            reduce=self._reduce,
            routes=self._routes,
            make_loader=self._make_loader,
            progress=self._progress,
        ).run(step)

    def measure(self, plan: Plan, data: StepData, record: Record, *, first: bool = False) -> None:
        """Time the actions of a plan; see `PlanRunner.measure`."""
        self._runner.measure(plan, data, record, first=first)

    def state(self) -> dict[str, StateTree]:
        """Return what a checkpoint holds of model and optimizer; parameters are views, to be filled in place."""
        return {**self.model_state(), "optimizer": self.optimizer.state()}

    def model_state(self) -> dict[str, StateTree]:
        """Return the parameters and persistent buffers by module and path."""
        return self.parts.model_state()

    def begin_at(self, samples: StepSamples, *, schedule_begun: int, broken: Collection[int] = ()) -> None:
        """Resume a run.

        Args:
            samples: of its steps.
            schedule_begun: steps that were done before its schedules of rates began.
            broken: numbers of the samples that it has left out.
        """
        self._broken.known.update(broken)
        self._samples, self.optimizer.schedule_begun = samples, schedule_begun

    @property
    def broken(self) -> Collection[int]:
        """Numbers of the samples that the run has left out, as their items can't be decoded."""
        return self._broken.known

    @property
    def samples(self) -> StepSamples:
        """Which samples each step reads."""
        assert self._samples is not None, "this job was resolved without training data"
        return self._samples

    @property
    def data(self) -> StepData:
        """The samples of the step that was run last."""
        assert self._last is not None
        return self._last[0].data

    def cut(self, saved: KeptSamples) -> StepData:
        """Return saved samples, cut as those of any step are; what is read of them from now on is saved too."""
        data = StepData.of_step(
            self.job, saved, lambda: saved.numbers, costs=self._costs, routes=self._routes, kept=saved
        )
        if saved.broken:
            data.mark_broken(saved.broken)
        return data

    def _run(self, batch: PendingBatch, following: PendingBatch | None, record: Record | None) -> LocalStats:
        self._last = batch, following
        self.optimizer.zero_gradients()
        share = self._runner.train(batch, following, record)
        return share + LocalStats(stops=int(self._progress.stops))

    def _then_read(self, step: int, share: LocalStats) -> LocalStats:
        """Return the share of a step whose forward and backward are done, with that of a later one that is read."""
        share += self._lookahead.prepare_next(step)
        return share + LocalStats(extra_sums=self._report.data_share(self.rank, self._loader.take_seconds()))

    def _make_loader(self, cut: Callable[[int], StepData], *, reach: int, last: int) -> StepLoader:
        """Return what reads batches by their numbers, for this rank."""
        return StepLoader(
            cut=cut,
            places=places_of(self.programs),
            settings=self.job.settings.data,
            reach=reach,
            last=last,
            progress=self._progress,
            staging=self._staging,
        )

    def _cut(self, step: int) -> StepData:
        job = self.job
        assert job.train is not None, "this job was resolved without training data"
        samples = self.samples
        return StepData.of_step(
            job,
            job.train,
            lambda: samples.numbers(step),
            costs=self._costs,
            routes=self._routes,
            known=samples.take_layout,
        )

    def _digest(self, data: StepData) -> tuple[int, ...] | None:
        return digest_of(data) if self.holds_modules else None

    def _reduce(self, share: LocalStats) -> ReducedStats:
        names = [module.name for module in self.job.modules]
        sums = {**FAULT_SUMS, **term_sums(self.job)}
        return agree(share, squares={}, modules=names, counts=COUNTS, extra_sums=sums, device=self.device)


def _own_rank(job: Job, device: torch.device | str) -> int:
    """Return this process's rank in the default group, which is made for a process alone."""
    if job.world > 1 and not dist.is_initialized():
        raise ConfigError(
            "modules",
            expected=f"a process group of {job.world} ranks, as the ranks of the modules say",
            got="none",
            fix="Make it in each process, or lay all modules on rank 0.",
        )
    join_alone(str(device))
    return dist.get_rank()
