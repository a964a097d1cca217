"""What one rank of a job does: steps, evaluations, and measurements, by the plans."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from mimo.data import Dataset, StepSampler
from mimo.hooks import ConfigError, EvaluationInfo, StateTree, StepInfo, UserError
from mimo.launch import Heartbeat
from mimo.launch.runtime import join_alone
from mimo.model import LanguageModelSpec
from mimo.optimizer.runtime import LocalStats, ReducedStats, StepDecision, StepResult, agree
from mimo.schedule import Plan, PlanPhase, Route
from mimo.schedule.runtime import Executor, Record
from mimo.trainer.batch.digest import check_length, difference, digest_of
from mimo.trainer.batch.lookahead import Coming, Lookout
from mimo.trainer.batch.route_cache import RouteCache
from mimo.trainer.batch.saved_samples import KeptSamples
from mimo.trainer.batch.step_data import StepData
from mimo.trainer.config.names import OPTIMIZER
from mimo.trainer.job.job import Job
from mimo.trainer.rerun.driver import Rerunner
from mimo.trainer.rerun.machine import RerunStateMachine
from mimo.trainer.rerun.passes import PASSES, computations
from mimo.trainer.resume.chain import Link
from mimo.trainer.step.build import Assembly
from mimo.trainer.step.memory_report import add_up_memory
from mimo.trainer.step.mfu import FlopsReport
from mimo.trainer.step.plan_progress import PlanProgress
from mimo.trainer.step.probe import Witness
from mimo.trainer.step.programs import COUNTS, EncoderProgram, Program, Written
from mimo.trainer.step.same_plan import check_plans
from mimo.trainer.step.tracing import Tracer
from mimo.trainer.step.traffic import TrafficReport


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
        assembly: makes what it is made of.
        progress: where this rank says what it does.
        machine: decides what becomes of steps that can't be right; None for nobody, as where nothing is stepped.
        objects: see `ProcessInfo`.

    Raises:
        ConfigError: the job has several ranks, and there is no process group.
        PlanError: ranks have made different plans.

    Attributes:
        model: this rank's modules.
        optimizer: steps them together with all other ranks.
        written: what the last evaluation wrote for the samples that this rank judged.
        objects: see `ProcessInfo`.
        stops: whether any rank had been asked to stop after the last step.
        data_begun: steps of the run before its data began.
        base: the checkpoint that has what those of the run leave out; None where they leave out nothing.
        imported: of modules that began with published folders, by name, what is known of that.
        heartbeat: says that this rank still works, for work that takes long outside of a step; for the main thread.
    """

    def __init__(
        self,
        job: Job,
        *,
        rank: int | None = None,
        device: torch.device | str = "cpu",
        assembly: type[Assembly] = Assembly,
        progress: Heartbeat | None = None,
        machine: RerunStateMachine | None = None,
        objects: dist.ProcessGroup | None = None,
    ) -> None:
        rank, device = _own_rank(job, device) if rank is None else rank, torch.device(device)
        self.job = job
        self._progress = progress or Heartbeat()
        self.heartbeat = self._progress.resume
        of_plans = PlanProgress(self._progress, job.graph.stage_ranks)
        self.stops = False
        self.rank = rank
        self.device = device
        self.objects = objects
        check_plans((job.plan, job.evaluation_plan), device=device)
        self._role = job.graph.role(rank)
        assert isinstance(job.language.spec, LanguageModelSpec)
        self._told = job.language.spec.aux_losses(job.language.config)
        self._traffic = TrafficReport(job, rank=rank, device=device)
        self._flops = FlopsReport(job, device=device)
        self._tracer = Tracer(job, rank=rank, device=device, objects=objects)
        self._judged = computations(job.model_graph)
        told = {**dict.fromkeys(self._told.losses, 1), **self._told.counts, **self._traffic.told}
        # Judged or not: another length of the message could change the order in which its sums are taken.
        told[PASSES] = len(self._judged)
        looks = machine is not None and machine.settings.mode != "disabled"
        self._witness = Witness(microbatches=job.microbatches, injector=machine.injector) if machine and looks else None
        parts = assembly(job, rank=rank, device=device, told=told, progress=of_plans, witness=self._witness)
        self.model = parts.model
        self.optimizer = parts.optimizer
        self._optimizer_bytes = add_up_memory(job, self.optimizer, device=device)
        self._named_groups = _named_groups(job)
        self.programs: tuple[Program, ...] = tuple(parts.programs.values())
        self._boundaries = parts.boundaries
        self.written: list[Written] = []
        self.data_begun = 0
        self.base: Link | None = None
        self.imported: Mapping[str, Any] = {}
        run = job.settings.run
        self._sampler = None if job.train is None else StepSampler(len(job.train), run.global_batch, run.seed)
        self._prefetches = any(module.prefetch for module in job.graph.modules)
        self._lookout = Lookout(
            cut=self._cut,
            digest=self._digest,
            agree=self._agree,
            reach=1 + self._prefetches,
            last=run.steps,
            progress=self._progress,
        )
        self._made: int | None = None
        """The step of which the rows have been made ahead."""
        self._half: PlanPhase = "both"
        """What of the plan the last step has done."""
        self._last: tuple[Coming, Coming | None] | None = None
        """The step that was run last, and the one after it."""
        self._rerunner = None if machine is None else Rerunner(machine, self, self._witness)
        self._routes = RouteCache()
        self._edges = {edge.name: edge for edge in job.graph.edges}
        self._training, self._evaluating = (
            Executor(graph, rank=rank, programs=parts.programs, boundaries=parts.boundaries, progress=of_plans)
            for graph in (job.graph, job.evaluation_graph)
        )

    def train(self, step: int) -> StepInfo:
        """Do one step on every rank: forward, backward, reduction, agreement, update."""
        record = self._tracer.begin(step)
        start = time.perf_counter()
        stepped = self.apply(step, self._propose(step, record))
        took = time.perf_counter() - start
        self._tracer.end(step, record, self._half)
        rows = stepped.agreed.rows
        return StepInfo(
            step=step,
            loss=stepped.loss,
            grad_norm=stepped.norm,
            lr=stepped.lr,
            label_tokens=stepped.agreed.label_tokens,
            rows=rows,
            norms=stepped.norms,
            seconds=took,
            module_seconds={
                module.name: stepped.agreed.seconds[module.name] / len(module.grid.ranks) for module in self.job.modules
            },
            tokens_per_second=rows[self.job.language.name] / took,
            truncated=stepped.agreed.counts["truncated"],
            skipped=stepped.skipped,
            losses={
                name: float(stepped.agreed.extra_sums[name]) / max(stepped.agreed.label_tokens, 1)
                for name in self._told.losses
            },
            counts={name: stepped.agreed.extra_sums[name].long().tolist() for name in self._told.counts},
            edges=self._traffic.read(stepped.agreed.extra_sums),
            loss_scale=stepped.loss_scale,
            group_norms={group: stepped.group_norms[group] for group in self._named_groups},
            optimizer_bytes=self._optimizer_bytes,
            zero_gradients=dict(stepped.agreed.zeros) if self.job.settings.logging.zero_gradients else {},
            flops=self._flops.of(self.data, label_tokens=stepped.agreed.label_tokens, seconds=took),
        )

    def accumulate(self, step: int, record: Record | None = None) -> LocalStats:
        """Run the plan of ``step``; gradients are then summed over the whole step, and not yet divided by anything.

        Args:
            step: which.
            record: takes down when each action was done.

        Returns:
            This rank's share of what the step adds up to, with the digest of a later step's samples.

        Raises:
            DataError: ranks do not hold the same samples, or they can't be read; nothing of the step has been sent.
        """
        job = self.job
        self.optimizer.zero_gradients()
        now, following = self._lookout.of(step)
        if now.fault is not None:
            raise now.fault
        if not now.alike:
            raise difference(job, now.data, where=f"step {step}", device=self.device)
        return self._accumulate(now, following, record) + LocalStats(digest=self._lookout.further(step))

    def repeat(self, data: StepData | None = None) -> LocalStats:
        """Run the last step once more, as `accumulate` did: from its own samples, or from the same that lie elsewhere.

        What was made ahead for it is made again, and what it makes ahead.
        """
        assert self._last is not None
        self.optimizer.zero_gradients()
        now, following = self._last
        tally = self._accumulate(now if data is None else attrs.evolve(now, data=data), following, None)
        return tally + LocalStats(digest=self._lookout.compared)

    def replay(self, step: int, data: StepData) -> LocalStats:
        """Run a step as `accumulate` does, from samples that nobody compares; nothing is made ahead for the next."""
        self.optimizer.zero_gradients()
        tally = self._accumulate(Coming(step=step, data=data, digest=None), None, None)
        return tally + LocalStats(digest=self._lookout.further(step))

    def _accumulate(self, now: Coming, following: Coming | None, record: Record | None) -> LocalStats:
        """Run the plan of a step, and before it what should have been made ahead, and is not."""
        self._last = now, following
        before = LocalStats()
        if self._prefetches and self._made != now.step:
            before = self._make_ahead(self.job.plan, now)
            if (fault := self._fault()) is not None:
                raise fault
        return (
            before
            + self._run_step(now, following, record)
            + self._noted()
            + LocalStats(stops=int(self._progress.stops))
        )

    def _noted(self) -> LocalStats:
        """Return what this rank's passes have come to, for the machine to judge."""
        if self._witness is None:
            return LocalStats()
        return LocalStats(extra_sums={PASSES: self._witness.sums(self._judged, loss_scale=self.optimizer.loss_scale)})

    def _make_ahead(self, plan: Plan, step: Coming) -> LocalStats:
        """Make what a step finds made when it begins, and return only what that cost."""
        self._made = None
        if self._witness is not None:
            self._witness.begin(None, step.step)
        tally = self._run(self._training, plan, step.data, judge=False, following=step.data, half="next")
        self._made = step.step
        return LocalStats(seconds=tally.seconds, extra_sums=tally.extra_sums)

    def _run_step(self, now: Coming, following: Coming | None, record: Record | None) -> LocalStats:
        """Run the plan of a step, and of the one that follows it what is made ahead, if that is known to begin."""
        ahead = following if following is not None and following.is_sound else None
        self._made, self._half = None, "this" if self._prefetches and ahead is None else "both"
        if self._witness is not None:
            self._witness.begin(now.step, None if ahead is None else ahead.step)
        tally = self._run(
            self._training,
            self.job.plan,
            now.data,
            judge=False,
            record=record,
            following=None if ahead is None else ahead.data,
            half=self._half,
        )
        if ahead is not None:
            self._made = ahead.step
            if (fault := self._fault()) is not None:
                self._lookout.blame(ahead.step, fault)
        return tally

    def _fault(self) -> UserError | None:
        """Return why this rank could not make ahead what the following step needs."""
        faults = (program.fault for program in self.programs if isinstance(program, EncoderProgram))
        return next((fault for fault in faults if fault is not None), None)

    def update(self, step: int, tally: LocalStats) -> StepResult:
        """Agree with all ranks on what `accumulate` has added up, and step every module, or skip on all ranks alike."""
        return self.apply(step, self.optimizer.propose(tally))

    def _propose(self, step: int, record: Record | None) -> StepDecision:
        if self._rerunner is None:
            return self.optimizer.propose(self.accumulate(step, record))
        return self._rerunner.propose(step, record)

    def apply(self, step: int, proposed: StepDecision) -> StepResult:
        """Step every module by what all ranks have agreed on, or skip on all ranks alike."""
        stepped = self.optimizer.apply(step, proposed)
        self._lookout.settle(alike=stepped.agreed.digests_equal)
        self.stops = stepped.agreed.stops > 0
        language = self.job.language
        assert isinstance(language.spec, LanguageModelSpec)
        if language.spec.experts is not None and not stepped.skipped:
            counts = {name: stepped.agreed.extra_sums[name] for name in self._told.counts}
            for part in self.model.parts_of(language.name):
                language.spec.experts.after_step(part.module, counts)
        return stepped

    def evaluate(self, step: int) -> EvaluationInfo | None:
        """Run the held-out samples through the same path without backward; None where there are none.

        Raises:
            DataError: ranks do not hold the same samples, or not equally many.
        """
        job = self.job
        if job.evaluation is None:
            return None
        check_length(len(job.evaluation), where="evaluation", device=self.device)
        if not len(job.evaluation):
            return None
        tally = LocalStats()
        self.written.clear()
        with torch.no_grad():
            for samples in _batches(job.evaluation, job.settings.evaluation_batch):
                data = StepData.cut(
                    job,
                    job.evaluation,
                    samples,
                    microbatches=job.evaluation_microbatches,
                    routes=self._routes,
                )
                with self._progress.within(f"{self._progress.doing}, reading samples {samples[0]} to {samples[-1]}"):
                    digest = self._digest(data)
                if not self._agree(LocalStats(digest=digest)).digests_equal:
                    raise difference(job, data, where=f"evaluation from sample {samples[0]} on", device=self.device)
                tally += self._run(self._evaluating, job.evaluation_plan, data, judge=True)
                self.written += [written for program in self.programs for written in program.written]
        agreed = self._agree(tally)
        return EvaluationInfo(
            step=step,
            loss=agreed.loss / max(agreed.label_tokens, 1),
            exact_match=agreed.counts["right"] / max(agreed.counts["samples"], 1),
            samples=agreed.counts["samples"],
        )

    def measure(self, plan: Plan, data: StepData, record: Record, *, first: bool = False) -> None:
        """Run a plan over samples as `accumulate` does, only to see how long it takes; no gradient is left.

        Args:
            plan: of a step.
            data: its samples, and the following step's.
            record: takes down when each action was done.
            first: whether the run before was of other samples.
        """
        self.optimizer.zero_gradients()
        if self._prefetches and first:
            self._run(self._training, plan, data, judge=False, following=data, half="next")
        self._made = None
        self._run(self._training, plan, data, judge=False, record=record, following=data if self._prefetches else None)
        if (fault := self._fault()) is not None:
            raise fault
        self.optimizer.zero_gradients()

    @property
    def judges_first(self) -> bool:
        """Whether this rank has judged samples, and is the first of those that have."""
        return bool(self.written) and self._role.places[self.job.language.name].dp == 0

    def state(self) -> dict[str, StateTree]:
        """Return what a checkpoint holds of model and optimizer; parameters are views, to be filled in place."""
        return {**self.model_state(), OPTIMIZER: self.optimizer.state()}

    def constants(self) -> frozenset[str]:
        """Return the names of the parameters here that nothing changes."""
        parts = [module.part for module in self.optimizer.modules.values()]
        return frozenset(name for part in parts for name in part.frozen.keys() - part.whole)

    def model_state(self) -> dict[str, StateTree]:
        """Return the parameters and persistent buffers by module and path."""
        buffers = self.buffers()
        return {
            module: {
                **{name.removeprefix(f"{module}."): value.detach() for name, value in weights.items()},
                **buffers[module],
            }
            for module, weights in self.optimizer.weights().items()
        }

    def buffers(self) -> dict[str, dict[str, Tensor]]:
        """Return the persistent buffers by module and path."""
        return {
            module: {
                name.removeprefix(f"{module}."): buffer
                for part in self.model.parts_of(module)
                for name, buffer in part.buffers.items()
            }
            for module in self.optimizer.modules
        }

    @property
    def holds_modules(self) -> bool:
        """Whether this rank holds any module."""
        return bool(self._role.places)

    @property
    def data(self) -> StepData:
        """The samples of the step that was run last."""
        assert self._last is not None
        return self._last[0].data

    def samples(self, step: int) -> tuple[int, ...]:
        """Return the numbers of the samples of a step."""
        assert self._sampler is not None
        return self._sampler.samples(step - self.data_begun)

    def cut(self, kept: KeptSamples) -> StepData:
        """Return kept samples, cut as those of any step are; what is read of them from now on is kept too."""
        return StepData.cut(
            self.job, kept, kept.numbers, microbatches=self.job.microbatches, routes=self._routes, kept=kept
        )

    def _cut(self, step: int) -> StepData:
        job = self.job
        assert job.train is not None, "this job was resolved without training data"
        return StepData.cut(job, job.train, self.samples(step), microbatches=job.microbatches, routes=self._routes)

    def _digest(self, data: StepData) -> tuple[int, ...] | None:
        return digest_of(data) if self.holds_modules else None

    def _agree(self, tally: LocalStats) -> ReducedStats:
        names = [module.name for module in self.job.modules]
        return agree(tally, squares={}, modules=names, counts=COUNTS, device=self.device)

    def _run(
        self,
        executor: Executor,
        plan: Plan,
        data: StepData,
        *,
        judge: bool,
        record: Record | None = None,
        following: StepData | None = None,
        half: PlanPhase = "both",
    ) -> LocalStats:
        for program in self.programs:
            program.begin(data, judge=judge, following=following)
        microbatches = (*data.microbatches, *(() if following is None else following.microbatches))

        def route(edge: str, microbatch: int) -> Route:
            return microbatches[microbatch].route(self._edges[edge], self.rank)

        self.optimizer.gather()
        seconds: dict[str, float] = {}
        for name, took in executor.run(plan, route, record, phase=half).items():
            module = self.job.module(name).name
            seconds[module] = seconds.get(module, 0.0) + took
        sent = self._traffic.tell({edge: boundary.take_traffic() for edge, boundary in self._boundaries.items()})
        return sum((program.tally() for program in self.programs), LocalStats(seconds=seconds, extra_sums=sent))


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


def _named_groups(job: Job) -> tuple[str, ...]:
    """Return the clip groups that settings name; norms of the others are those of modules, or of all."""
    found = {group for module in job.modules for group in module.optimizer.rules.clip_groups}
    return tuple(sorted(found - {"", *(module.name for module in job.modules)}))


def _batches(dataset: Dataset, size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(dataset), size):
        yield range(start, min(start + size, len(dataset)))
