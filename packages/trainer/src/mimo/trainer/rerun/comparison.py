"""Runs of one step: how far they are apart, and where they part first. Ranks talk where said, in no healthy step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import attrs
import torch
import torch.distributed as dist

from mimo.optimizer.runtime import StepDecision
from mimo.schedule import Costs, simulate
from mimo.topology.collectives import all_gather_json
from mimo.trainer.job.job import Job
from mimo.trainer.rerun.passes import Anomaly
from mimo.trainer.step.probe import Computation


@attrs.frozen(kw_only=True)
class StepRun:
    """What one run of a step came to.

    Args:
        values: loss, gradient norm, and norms by module, the same on all ranks.
        norms: what this rank saw of its computations.
        reason: why it can't be right; empty if it can.
        passes: the passes for which alone it can't be; None where loss or gradient norm say so too.
    """

    values: Mapping[str, float]
    norms: Mapping[Computation, float]
    reason: str
    passes: Anomaly | None = None

    @classmethod
    def of(cls, proposed: StepDecision, norms: Mapping[Computation, float], verdict: str | Anomaly) -> StepRun:
        """Return the run that came to what is proposed, with why it can't be right."""
        values = {"loss": proposed.loss, "grad_norm": proposed.norm}
        values |= {f"norms.{name}": norm for name, norm in proposed.norms.items()}
        if isinstance(verdict, Anomaly):
            return cls(values=values, norms=norms, reason=verdict.reason, passes=verdict)
        return cls(values=values, norms=norms, reason=verdict)


def relative_difference(one: float, other: float) -> float:
    """Return the relative difference of two numbers, infinite where they differ and not both are finite."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other))


def relative_differences(one: StepRun, other: StepRun) -> dict[Computation, float]:
    """Return the relative difference of each of this rank's computations in two runs."""
    every = dict.fromkeys([*one.norms, *other.norms])
    return {
        computation: relative_difference(one.norms.get(computation, 0.0), other.norms.get(computation, 0.0))
        for computation in every
    }


def differences(one: StepRun, other: StepRun, modules: Iterable[str]) -> dict[str, float]:
    """Return how far apart two runs are, as far as this rank sees: values, and the passes of each module."""
    found = {name: relative_difference(value, other.values[name]) for name, value in one.values.items()}
    passes = relative_differences(one, other)
    for module in modules:
        found[f"passes.{module}"] = max(
            (off for computation, off in passes.items() if computation.module == module), default=0.0
        )
    return found


def difference(one: StepRun, other: StepRun, device: torch.device) -> float:
    """Return the largest relative difference of two runs, on all ranks. Collective."""
    values = [relative_difference(value, other.values[name]) for name, value in one.values.items()]
    largest = torch.tensor(max(*values, *relative_differences(one, other).values()), dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


@attrs.frozen(kw_only=True)
class Where:
    """Where two runs part first, or a run goes wrong first: one computation, and the ranks that share it."""

    computation: Computation | None
    ranks: tuple[int, ...]


@attrs.frozen
class Order:
    """When each computation comes in a step, whoever does it; found when it is first asked for.

    Each rank has its own list and no clock is common to them, so that the plan is played through with each pass taking
    one unit: what depends on something begins after it.

    Args:
        job: the whole.
        rank: this one.
        objects: see `ProcessInfo`.
    """

    job: Job
    rank: int
    objects: dist.ProcessGroup | None

    @cached_property
    def _starts(self) -> Mapping[tuple[bool, str, int, tuple[int, ...]], float]:
        """By whether it is a backward, module, stage and microbatches; what is made ahead is before everything."""
        plan = self.job.plans[-1]  # which has the computations of all others
        played = simulate(plan, self.job.graph, Costs.even(self.job.graph))
        found = {}
        for bar in played.timeline.bars:
            action = bar.action
            if self.rank in bar.ranks and action.kind in ("forward", "backward", "input-gradient"):
                ahead = plan.is_ahead(action)
                served = tuple(one - plan.microbatches * ahead for one in action.microbatches)
                key = (action.kind != "forward", *self.job.built(action.stage_id), served)
                found[key] = bar.start - played.seconds * ahead
        return found

    def _place(self, computation: Computation) -> list[Any]:
        """Return what sorts a computation among those of all ranks; gradients of parameters come last."""
        names = [module.name for module in self.job.modules]
        rest = [names.index(computation.module), computation.stage, list(computation.microbatches)]
        if computation.kind in ("tied", "gradients"):
            return [1 if computation.kind == "tied" else 2, 0.0, 0, *rest]
        start = self._starts[
            computation.kind == "backward", computation.module, computation.stage, computation.microbatches
        ]
        return [0, start, int(computation.kind == "loss"), *rest]

    def first(self, computations: Iterable[Computation]) -> Where:
        """Return the earliest of the computations that ranks name, and who names it. Collective."""
        mine = min(computations, key=self._place, default=None)
        gathered = all_gather_json(None if mine is None else [self._place(mine), plain_computation(mine)], self.objects)
        named = [one for one in gathered if one is not None]
        if not named:
            return Where(computation=None, ranks=())
        _, plain = min(named, key=lambda one: one[0])
        ranks = tuple(rank for rank, one in enumerate(gathered) if one is not None and one[1] == plain)
        return Where(computation=read_computation(plain), ranks=ranks)


def plain_computation(computation: Computation) -> dict[str, Any]:
    """Return a computation as JSON."""
    return {**attrs.asdict(computation), "microbatches": list(computation.microbatches)}


def read_computation(plain: Mapping[str, Any]) -> Computation:
    """Return what `plain_computation` made JSON of."""
    return Computation(**{**plain, "microbatches": tuple(plain["microbatches"])})


def wrong(run: StepRun, bound: Callable[[Computation], float]) -> list[Computation]:
    """Return this rank's computations that are not finite, or above their bound."""
    return [
        computation
        for computation, norm in run.norms.items()
        if not norm <= bound(computation) or not math.isfinite(norm)
    ]
