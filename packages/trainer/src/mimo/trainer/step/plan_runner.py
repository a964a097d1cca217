"""Runs plans over the samples of a step on one rank, and reports to the heartbeat what it does and waits for.

Modules with ``prefetch`` compute their part of the following step in this one: rows made ahead stay in the executor,
and what is added up over them in the programs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import attrs
import torch
import torch.distributed as dist
from torch.profiler import record_function

from mimo.hooks import PlanError
from mimo.launch import Heartbeat
from mimo.optimizer.runtime import LocalStats
from mimo.schedule import Action, Plan, PlanPhase, Route
from mimo.schedule.runtime import Executor, Record
from mimo.topology import StageId, show_ranks
from mimo.topology.collectives import all_gather_single
from mimo.trainer.batch.lookahead import PendingBatch
from mimo.trainer.batch.step_data import StepData
from mimo.trainer.job.job import Job
from mimo.trainer.step.build import RankParts
from mimo.trainer.step.probe import PASSES, StepProbe, computations
from mimo.trainer.step.programs.program import NumberedData, Program
from mimo.trainer.step.traffic import TrafficReport

_BYTES = 8
_WHOLE: PlanPhase = "both"
_WORDS = {"input-gradient": "backward", "weight-gradient": "weight gradients", "reduce": "sum of gradients"}


class PlanRunner:
    """Runs the plans of a job on one rank; every rank of the world runs the same.

    Args:
        job: the same on every rank.
        parts: what this rank is made of.
        rank: this process.
        traffic: counts what the edges carry.
        probe: records what the stages compute while they train; None for none.
        progress: where this rank reports what it does.

    Attributes:
        plan: of the last step.
        phase: what of it the step ran: rows made ahead for it have been computed before.
    """

    def __init__(
        self,
        job: Job,
        parts: RankParts,
        *,
        rank: int,
        traffic: TrafficReport,
        probe: StepProbe | None,
        progress: PlanProgress,
    ) -> None:
        self.plan, self.phase = job.plan, _WHOLE
        self.prefetches = any(module.prefetch for module in job.graph.modules)
        self.programs: tuple[Program, ...] = tuple(parts.programs.values())
        self._job = job
        self._rank = rank
        self._optimizer = parts.optimizer
        self._boundaries = parts.boundaries
        self._traffic = traffic
        self._probe = probe
        self._recorded = computations(job.model_graph)
        self._edges = {edge.name: edge for edge in job.graph.edges}
        self._made_ahead: int | None = None
        """The step of which the rows have been made ahead."""
        self._training, self._evaluating = (
            Executor(graph, rank=rank, programs=parts.programs, boundaries=parts.boundaries, progress=progress)
            for graph in (job.graph, job.evaluation_graph)
        )

    def train(self, batch: PendingBatch, following: PendingBatch | None, record: Record | None) -> LocalStats:
        """Run forward and backward of a step; before it, what should have been made ahead and is not.

        Args:
            batch: of the step.
            following: of the step after it, if rows of that are to be made ahead.
            record: takes down when each action was done.

        Returns:
            This rank's share of what the step adds up to.
        """
        before = LocalStats()
        if self.prefetches and self._made_ahead != batch.step:
            before = self._make_ahead(batch)
        ahead = following if following is not None and following.is_sound else None
        self._made_ahead, self.phase = None, "this" if self.prefetches and ahead is None else _WHOLE
        self.plan = self._job.plan_of(len(batch.data.microbatches))
        if self._probe is not None:
            self._probe.begin(batch.step, None if ahead is None else ahead.step)
        share = self._run(
            self._training,
            self.plan,
            NumberedData(batch.data, batch.step),
            record=record,
            following=None if ahead is None else NumberedData(ahead.data, ahead.step),
            phase=self.phase,
        )
        if ahead is not None:
            self._made_ahead = ahead.step
        return before + share + self._recorded_sums()

    def evaluate(self, data: StepData) -> LocalStats:
        """Run forward of held-out samples, and compare each label with the argmax."""
        return self._run(self._evaluating, self._job.evaluation_plan, NumberedData(data, None), scores=True)

    def measure(self, plan: Plan, data: StepData, record: Record, *, first: bool = False) -> None:
        """Run a plan as `train` does, to time its actions; gradients are dropped.

        Args:
            plan: of a step.
            data: its samples, and the following step's.
            record: takes down when each action was done.
            first: whether the run before was of other samples.
        """
        self._optimizer.zero_gradients()
        step = NumberedData(data, 0)  # one that no run has
        if self.prefetches and first:
            self._run(self._training, plan, step, following=step, phase="next")
        self._made_ahead = None
        self._run(self._training, plan, step, record=record, following=step if self.prefetches else None)
        self._optimizer.zero_gradients()

    def _make_ahead(self, batch: PendingBatch) -> LocalStats:
        """Make the rows that a step expects when it begins, and return only the time and traffic of that."""
        self._made_ahead = None
        if self._probe is not None:
            self._probe.begin(None, batch.step)
        plan = self._job.plan_of(len(batch.data.microbatches))
        step = NumberedData(batch.data, batch.step)
        share = self._run(self._training, plan, step, following=step, phase="next")
        self._made_ahead = batch.step
        return LocalStats(seconds=share.seconds, extra_sums=share.extra_sums)

    def _recorded_sums(self) -> LocalStats:
        """Return this rank's share of what the probe has recorded."""
        if self._probe is None:
            return LocalStats()
        return LocalStats(extra_sums={PASSES: self._probe.sums(self._recorded, loss_scale=self._optimizer.loss_scale)})

    def _run(
        self,
        executor: Executor,
        plan: Plan,
        data: NumberedData,
        *,
        scores: bool = False,
        record: Record | None = None,
        following: NumberedData | None = None,
        phase: PlanPhase = _WHOLE,
    ) -> LocalStats:
        for program in self.programs:
            program.begin(data, scores=scores, following=following, phase=phase)
        microbatches = (*data.data.microbatches, *(() if following is None else following.data.microbatches))

        def route(edge: str, microbatch: int) -> Route:
            return microbatches[microbatch].route(self._edges[edge], self._rank)

        self._optimizer.gather()
        seconds: dict[str, float] = {}
        for name, took in executor.run(plan, route, record, phase=phase).items():
            module = self._job.module(name).name
            seconds[module] = seconds.get(module, 0.0) + took
        sent = self._traffic.share({edge: boundary.take_traffic() for edge, boundary in self._boundaries.items()})
        return sum((program.share() for program in self.programs), LocalStats(seconds=seconds, extra_sums=sent))


def check_plans(plans: Iterable[Plan], *, device: torch.device, costs: str = "") -> None:
    """Refuse plans that differ between ranks, which would wait for each other. Call it on every rank of the world.

    Args:
        plans: those that this rank will run, in the same order everywhere.
        device: where the process group works.
        costs: what samples are placed by, beside their sizes.

    Raises:
        PlanError: two ranks are named that have different plans.
    """
    found = hashlib.blake2b(digest_size=_BYTES)
    for plan in plans:
        found.update(plan.to_json().encode())
    found.update(costs.encode())
    mine = torch.tensor([int.from_bytes(found.digest(), "big", signed=True)], device=device)
    everybody = mine.new_empty(dist.get_world_size())
    all_gather_single(everybody, mine)
    first, *others = everybody.tolist()
    for rank, other in enumerate(others, start=1):
        if other != first:
            raise PlanError(
                "schedule",
                expected="the same plan on all ranks",
                got=f"one on rank 0, and another on rank {rank}",
                fix="Give their machines the same data, the same file under schedule.profile, and the same packages.",
            )


@attrs.frozen
class PlannedActivity:
    """An action of a plan, as an `Activity`.

    Args:
        action: of the plan.
        stage_ranks: the ranks of a stage, who meet in a reduction.
    """

    action: Action
    stage_ranks: Callable[[StageId], tuple[int, ...]]

    def describe(self) -> str:
        """Return what it does, as ``forward of vision stage 0, microbatch 1``."""
        action = self.action
        text = f"{_WORDS.get(action.kind, action.kind)} of {action.module} stage {action.stage}"
        if not action.microbatches:
            return text
        noun = "microbatches" if len(action.microbatches) > 1 else "microbatch"
        return f"{text}, {noun} {show_ranks(action.microbatches)}"

    def collective_ranks(self) -> tuple[int, ...]:
        """Return the ranks of a reduction; in other actions ranks meet in collectives, which the stack shows."""
        return self.stage_ranks(self.action.stage_id) if self.action.kind == "reduce" else ()


@attrs.define(eq=False)
class PlanProgress:
    """Reports the actions and waits of the executor to the heartbeat of this process, and actions to torch's profiler.

    It is a `mimo.schedule.runtime.Progress`.

    Args:
        heartbeat: of this process.
        stage_ranks: the ranks of a stage.
    """

    heartbeat: Heartbeat
    stage_ranks: Callable[[StageId], tuple[int, ...]]
    _profiled: record_function | None = attrs.field(default=None, init=False)

    def begin(self, action: Action | None) -> None:
        """Report the action that begins; None: all are done."""
        activity = None if action is None else PlannedActivity(action, self.stage_ranks)
        self.heartbeat.begin(activity)
        if self._profiled is not None:
            self._profiled.__exit__(None, None, None)
            self._profiled = None
        if activity is not None and torch.autograd.profiler._is_profiler_enabled:  # noqa: SLF001 - else each action would take 10 microseconds more
            self._profiled = record_function(activity.describe())
            self._profiled.__enter__()

    def wait(self, edge: str, peer: int) -> None:
        """Report that rows of an edge are awaited from another rank, or that it takes those sent to it."""
        self.heartbeat.wait(edge, peer)

    def resume(self, is_over: Callable[[], bool]) -> None:
        """Report that they have come, or have been taken, or that a device waits for that by itself."""
        self.heartbeat.resume(is_over)
