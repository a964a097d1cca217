"""What a step came to, as plugins get it: loss, norms, rows, traffic, arithmetic and bytes of optimizers.

PaLM (arXiv:2204.02311), appendix B: model FLOPs utilisation counts what forward and backward need, hardware FLOPs
utilisation also what is computed again.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from mimo.hooks import Flops, MemoryBytes, OptimizerBytes, StepInfo
from mimo.model import LanguageModelSpec
from mimo.optimizer.runtime import MimoOptimizer, StepResult
from mimo.trainer.batch.step_data import StepData
from mimo.trainer.cost.operations import Operations, module_operations
from mimo.trainer.cost.peak import peak_of
from mimo.trainer.cost.sample_stats import SampleStats
from mimo.trainer.job.job import Job
from mimo.trainer.step.programs.loss_terms import term_losses, term_sums
from mimo.trainer.step.traffic import TrafficReport

DATA_SECONDS = "data.seconds"
"""Name of the seconds that each rank has waited for data in the step's message."""


class StepReport:
    """Makes a `StepInfo` of what all ranks have agreed on.

    Args:
        job: the same on every rank.
        traffic: reads what the edges carried.
        device: where this rank computes.
    """

    def __init__(self, job: Job, *, traffic: TrafficReport, device: torch.device) -> None:
        assert isinstance(job.language.spec, LanguageModelSpec)
        self._job = job
        self._announced = job.language.spec.aux_losses(job.language.config)
        self._traffic = traffic
        self._flops = FlopsReport(job, device=device)
        groups = {group for module in job.modules for group in module.optimizer.rules.clip_groups}
        # Norms of the other groups are those of modules, or of all.
        self._groups = tuple(sorted(groups - {"", *(module.name for module in job.modules)}))

    @property
    def extra_sums(self) -> Mapping[str, int]:
        """What ranks sum for it beside losses and counts: names and lengths, in the order of the step's message."""
        losses = {**dict.fromkeys(self._announced.losses, 1), **term_sums(self._job)}
        sums = {**losses, **self._announced.counts, **self._traffic.extra_sums}
        return {**sums, DATA_SECONDS: self._job.world}

    def data_share(self, rank: int, seconds: float) -> Mapping[str, Tensor]:
        """Return what a rank that has waited so long for data adds to the sums: each has a place of its own."""
        waited = torch.zeros(self._job.world, dtype=torch.float64)
        waited[rank] = seconds
        return {DATA_SECONDS: waited}

    def of(
        self,
        step: int,
        result: StepResult,
        data: StepData,
        *,
        dropped: int,
        seconds: float,
        optimizer_bytes: Mapping[str, OptimizerBytes],
        memory: Mapping[str, MemoryBytes],
    ) -> StepInfo:
        """Return what a step came to.

        Args:
            step: its number.
            result: of the update.
            data: its samples.
            dropped: samples that it has left out.
            seconds: that it took.
            optimizer_bytes: of `add_up_memory`.
            memory: of `MemoryReport`.
        """
        job, sums = self._job, result.agreed
        samples = SampleStats.of_layouts(job, data.layouts)
        return StepInfo(
            step=step,
            loss=result.loss,
            grad_norm=result.norm,
            lr=result.lr,
            label_tokens=samples.labels,
            label_weight=sums.label_weight,
            rows=sums.rows,
            norms=result.norms,
            seconds=seconds,
            data_seconds=float(sums.extra_sums[DATA_SECONDS].max()),
            broken=len(data.broken) if job.settings.data.max_broken else 0,  # which lays out all samples
            module_seconds={module.name: sums.seconds[module.name] / len(module.grid.ranks) for module in job.modules},
            tokens_per_second=sums.rows[job.language.name] / seconds,
            truncated=sums.counts["truncated"],
            samples=len(samples.lengths),
            dropped=dropped,
            skipped=result.skipped,
            losses={
                **{name: float(sums.extra_sums[name]) / sums.divisor for name in self._announced.losses},
                **term_losses(job, sums),
            },
            counts={name: sums.extra_sums[name].long().tolist() for name in self._announced.counts},
            edges=self._traffic.read(sums.extra_sums),
            loss_scale=result.loss_scale,
            group_norms={group: result.group_norms[group] for group in self._groups},
            optimizer_bytes=optimizer_bytes,
            zero_gradients=dict(sums.zeros) if job.settings.logging.zero_gradients else {},
            flops=self._flops.of(samples, seconds=seconds),
            memory=memory,
        )


class FlopsReport:
    """Tells the arithmetic of steps, from lengths, labels and sizes that every rank knows: nothing is sent for it.

    Args:
        job: the same on every rank.
        device: where this rank computes; all ranks are taken to have the like.
    """

    def __init__(self, job: Job, *, device: torch.device) -> None:
        self._job = job
        self._peak = peak_of(job.settings.run, device)
        self._modules = [module for module in job.modules if module.spec.flops is not None]
        self._known: tuple[SampleStats, Mapping[str, Operations]] | None = None
        """Of the step before: steps of samples that are all as long do the same."""

    def of(self, samples: SampleStats, *, seconds: float) -> Mapping[str, Flops]:
        """Return by module what a step comes to; a module whose plugin does not tell is left out.

        Args:
            samples: of the step.
            seconds: that the step took.
        """
        if self._known is None or self._known[0] != samples:
            names = [module.name for module in self._modules]
            self._known = samples, {name: module_operations(self._job, name, samples) for name in names}
        _, done = self._known
        return {
            module.name: self._flops(done[module.name], seconds * len(module.grid.ranks)) for module in self._modules
        }

    def _flops(self, done: Operations, seconds: float) -> Flops:
        """Return what a module comes to whose ranks have spent so many seconds, all of them together."""
        model = done.forward + done.backward
        hardware = model + done.repeated
        return Flops(
            model_operations=model,
            hardware_operations=hardware,
            model_flops=model / seconds,
            hardware_flops=hardware / seconds,
            mfu=model / seconds / self._peak if self._peak else None,
            hfu=hardware / seconds / self._peak if self._peak else None,
        )


def add_up_memory(job: Job, optimizer: MimoOptimizer, *, device: torch.device) -> Mapping[str, OptimizerBytes]:
    """Return what a module's optimizers hold on all its ranks together, by module; called on all ranks.

    It does not travel with the ranks' agreement on each step: a longer message would be summed in another order, and
    the norm in it be another one in its last bit.

    Args:
        job: the same on every rank.
        optimizer: this rank's, as it was made: what it holds then it keeps.
        device: where the process group works.
    """
    choices = {module.name: module.optimizer for module in job.modules}
    names = [
        name
        for name, choice in choices.items()
        if any(spec.memory for spec in (choice.spec, *(pattern.rule.spec for pattern in choice.patterns)))
    ]
    if not names:
        return {}
    found = torch.zeros(len(names), len(attrs.fields(OptimizerBytes)), dtype=torch.int64)
    for row, name in zip(found, names, strict=True):
        for stepper in optimizer.modules[name].steppers if name in optimizer.modules else ():
            if stepper.rule.spec.memory is not None:
                row.add_(torch.tensor(attrs.astuple(stepper.rule.spec.memory(stepper.optimizer))))
    found = found.to(device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(found)
    return {name: OptimizerBytes(*row) for name, row in zip(names, found.tolist(), strict=True)}
