"""What ranks hold, for the metrics: by kind and module in some steps, and as the device's allocator counts it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
import torch.distributed as dist

from mimo.hooks import MemoryBytes
from mimo.schedule import Plan, PlanPhase
from mimo.schedule.runtime import Record
from mimo.topology.collectives import all_gather_json
from mimo.trainer.cost.memory import RankMemory, estimate_memory, estimate_modules
from mimo.trainer.job.job import Job
from mimo.trainer.memory.tracker import Labels, MemoryPeak, MemoryTracker

_NAMES = {"state": "optimizer"}
"""Kinds of `RankMemory` that have another name in the metrics."""


class MemoryReport:
    """Measures what this rank holds in some steps. Make it, and call it, on every rank of the world.

    Args:
        job: the same on every rank.
        rank: this process.
        device: where this rank computes.
        labels: see `MemoryTracker`.
        objects: see `ProcessInfo`.
    """

    def __init__(
        self,
        job: Job,
        *,
        rank: int,
        device: torch.device,
        labels: Callable[[], Labels],
        objects: dist.ProcessGroup | None = None,
    ) -> None:
        self._job, self._rank, self._device = job, rank, device
        self._labels, self._objects = labels, objects
        self._names = [module.name for module in job.modules if rank in module.grid]
        self._counts = device.type != "cpu"
        self._tracker: MemoryTracker | None = None
        self._estimates: tuple[RankMemory, Mapping[str, RankMemory]] | None = None

    @contextlib.contextmanager
    def measured(self, record: Record | None) -> Iterator[None]:
        """Measure, within a block, what the actions of a record hold, where ``logging.memory`` asks for it."""
        if record is None or not self._job.settings.logging.memory:
            yield
            return
        with MemoryTracker(record, self._labels) as self._tracker:
            yield

    def of(self, step: int, plan: Plan, phase: PlanPhase) -> Mapping[str, MemoryBytes]:
        """Return by module what there is to report of a step, which did ``phase`` of a plan: the same on all ranks."""
        settings = self._job.settings
        is_counted = self._counts and (step % settings.logging.interval == 0 or step == settings.run.steps)
        tracker, self._tracker = self._tracker, None
        if tracker is None and not is_counted:
            return {}
        found = {name: MemoryBytes() for name in self._names}
        if tracker is not None:
            found |= self._beside_estimates(tracker.peak(plan.phase(phase).actions_of(self._rank)))
        if is_counted:
            found = self._counted(found)
        everybody = all_gather_json({name: attrs.asdict(one) for name, one in found.items()}, self._objects)
        by_module = {
            module.name: [ranks[module.name] for ranks in everybody if module.name in ranks]
            for module in self._job.modules
        }
        return {name: MemoryBytes(**max(some, key=_size)) for name, some in by_module.items()}

    def _beside_estimates(self, peak: MemoryPeak) -> Mapping[str, MemoryBytes]:
        if self._estimates is None:
            whole = estimate_memory(self._job).get(self._rank, RankMemory())
            self._estimates = whole, estimate_modules(self._job, self._rank)
        whole, modules = self._estimates
        held = {name: _of_module(self._job, peak, name) for name in self._names}
        return {
            name: MemoryBytes(
                held=held[name],
                estimated=_by_kind(modules[name]),
                rank_held=peak.total,
                rank_estimated=whole.device,
            )
            for name in self._names
        }

    def _counted(self, found: Mapping[str, MemoryBytes]) -> dict[str, MemoryBytes]:
        """Return the same with what the allocator has counted, which begins anew."""
        allocated = torch.accelerator.max_memory_allocated(self._device)
        reserved = torch.accelerator.max_memory_reserved(self._device)
        torch.accelerator.reset_peak_memory_stats(self._device)
        return {name: attrs.evolve(one, allocated=allocated, reserved=reserved) for name, one in found.items()}


def _of_module(job: Job, peak: MemoryPeak, name: str) -> Mapping[str, int]:
    """Return what a peak holds of a module by kind; plans may have it in two parts."""
    found: dict[str, int] = {}
    for part, kinds in peak.modules.items():
        if part and job.module(part).name == name:
            for kind, count in kinds.items():
                found[kind] = found.get(kind, 0) + count
    return found


def _by_kind(memory: RankMemory) -> Mapping[str, int]:
    """Return an estimate by kind, of what lies on the device."""
    kinds = ("weights", "gathered", "gradients", "state", "activations", "ahead")
    return {_NAMES.get(kind, kind): count for kind in kinds if (count := getattr(memory, kind))}


def _size(one: Mapping[str, Any]) -> tuple[int, int]:
    return one["rank_held"] or 0, one["allocated"] or 0
