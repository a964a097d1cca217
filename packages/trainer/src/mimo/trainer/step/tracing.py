"""``logging.trace``: what every rank did in some steps, beside the same plan simulated, as a trace and a page.

Ranks take down times as they work and send them to rank 0 once the step is over. Processes of one machine read one
clock; those of others are taken to leave the barrier before the step at one moment, which is as good as that barrier.
"""

from __future__ import annotations

import platform
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import attrs
import torch
import torch.distributed as dist

from mimo.schedule import Bar, Costs, Plan, PlanPhase, Seconds, StageCost, Timeline
from mimo.schedule.runtime import Moment, Record, measured, timer_of
from mimo.topology import ModuleGraph, StageId
from mimo.trainer.config.names import TRACES
from mimo.trainer.cost.step_cost import job_costs
from mimo.trainer.job.job import Job

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_TIMES = 3


class Tracer:
    """Records some steps of a run on one rank. Make it, and call it, on every rank of the world.

    Args:
        job: the same on every rank.
        rank: this process.
        device: where messages between all ranks are made up.
        objects: see `ProcessInfo`.
    """

    def __init__(self, job: Job, *, rank: int, device: torch.device, objects: dist.ProcessGroup | None = None) -> None:
        self._job = job
        self._rank = rank
        self._device = device
        self._objects = objects
        self._costs = job_costs(job) if job.settings.logging.trace and rank == 0 else None  # by a profile as it is now
        self._steps = 0
        self._clock = 0.0

    def begin(self, step: int) -> Record | None:
        """Return what is to take down ``step``, where it is to be traced or its memory measured."""
        self._steps += 1
        settings = self._job.settings
        wanted = settings.logging.trace or settings.logging.memory
        if not wanted or not is_traced(self._steps, last=step == settings.run.steps):
            return None
        dist.barrier(group=self._objects)
        self._clock = time.perf_counter()
        return Record(timer=timer_of(self._device))

    def end(self, step: int, record: Record | None, plan: Plan, phase: PlanPhase) -> None:
        """Gather what the ranks took down of a traced step, which did ``phase`` of a plan, and write it on rank 0."""
        if record is None or not self._job.settings.logging.trace:
            return
        plan = plan.phase(phase)
        longest = max(len(actor.actions) for actor in plan.actors)
        mine = torch.zeros(1 + longest, _TIMES, dtype=torch.float64)  # the first row is about the clock
        mine[0] = torch.tensor([_machine(), self._clock, 0.0], dtype=torch.float64)
        for at, moment in enumerate(record.moments, start=1):
            mine[at] = torch.tensor([moment.began, moment.ready, moment.ended], dtype=torch.float64)
        mine = mine.to(self._device)
        if self._rank != 0:
            dist.gather(mine, dst=0)
            return
        all_times = [torch.zeros_like(mine) for _ in range(self._job.world)]
        dist.gather(mine, all_times, dst=0)
        moments = {
            rank: _moments(plan, rank, times)
            for rank, times in enumerate(_on_one_clock([times.cpu().tolist() for times in all_times]))
        }
        self._write(step, plan, moments)

    def _write(self, step: int, plan: Plan, moments: Mapping[int, Sequence[Moment]]) -> None:
        from mimo.schedule import simulate, write_page, write_trace

        job, costs = self._job, self._costs
        assert costs is not None, "traces are written on rank 0 alone"
        name = f"{plan.schedule}, measured in step {step}"
        done = measured(name, job.graph, range(job.world), moments)
        if job.settings.schedule.profile:
            how = f"by the profile {job.settings.schedule.profile}"
        else:
            costs, how = mean_costs(done, job.graph, costs), f"with the mean times of step {step}"
        timelines = [done, simulate(plan, job.graph, costs, f"{plan.schedule}, simulated {how}").timeline]
        folder = job.directory / TRACES
        folder.mkdir(parents=True, exist_ok=True)
        write_trace(folder / f"step_{step:08d}.json", timelines)
        write_page(folder / f"step_{step:08d}.html", timelines, title=f"{job.settings.run.name}: step {step}")


def is_traced(count: int, *, last: bool) -> bool:
    """Tell whether the ``count``-th step of a process is traced: the 2nd, 4th, 8th, 16th … and the last of a run.

    The first is left out, in which much is done that no later step does; so few are traced that nobody need tidy up.
    """
    return last or (count > 1 and count & (count - 1) == 0)


def mean_costs(timeline: Timeline, graph: ModuleGraph, otherwise: Costs) -> Costs:
    """Return costs by which each computation takes as long as those of its kind and stage did on average.

    Args:
        timeline: measured.
        graph: of the plan.
        otherwise: whence bytes and the times of messages are taken.
    """
    bars: dict[StageId, list[Bar]] = {stage: [] for stage in graph.stages}
    for bar in timeline.bars:
        bars[bar.action.stage_id].append(bar)
    stages = {stage: _mean_cost(bars[stage], cost) for stage, cost in otherwise.stages.items()}
    return attrs.evolve(otherwise, stages=stages).trained(graph)


def _mean_cost(bars: Sequence[Bar], otherwise: StageCost) -> StageCost:
    def each(*kinds: str) -> float:
        found = [bar for bar in bars if bar.action.kind in kinds]
        return fmean((bar.finish - bar.start) / len(bar.action.microbatches) for bar in found) if found else 0.0

    # One who waits inside a reduction for others takes longer than the reduction does.
    reduces = [bar.finish - bar.start for bar in bars if bar.action.kind == "reduce" and bar.action.edge is None]
    whole = each("backward") / 2
    return attrs.evolve(
        otherwise,
        forward=Seconds(each=each("forward")),
        input_gradient=Seconds(each=each("input-gradient") + whole),
        weight_gradient=Seconds(each=each("weight-gradient") + whole),
        recompute=Seconds(),
        reduce=min(reduces, default=0.0),
    )


def _on_one_clock(ranks: Sequence[list[list[float]]]) -> list[list[list[float]]]:
    """Return the times of each rank by the clock of rank 0, without the first row, which tells of the clocks."""
    machine, clock, _ = ranks[0][0]
    found = []
    for (here, left, _), *times in ranks:
        ahead = 0.0 if here == machine else left - clock
        found.append([[moment - ahead for moment in row] for row in times])
    return found


def _moments(plan: Plan, rank: int, times: Sequence[Sequence[float]]) -> list[Moment]:
    actions = plan.actions_of(rank)
    return [
        Moment(action=action, began=began, ready=ready, ended=ended)
        for action, (began, ready, ended) in zip(actions, times, strict=False)  # lists are filled up to the longest
    ]


def _machine() -> int:
    """Return a number that processes of one machine share: of its last start, or of its name where that is unknown."""
    name = _BOOT.read_text(encoding="utf-8") if _BOOT.is_file() else platform.node()
    return zlib.crc32(name.encode())
