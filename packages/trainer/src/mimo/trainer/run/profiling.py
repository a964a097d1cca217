"""What each rank does for `mimo profile`: steps of the job with microbatches of several sizes, each action timed.

Nothing is updated and nothing written but the profile. The job's own plan runs as it is, and in turn with its
backwards split, so that both parts are known whatever the schedule.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

import attrs
import torch
import torch.distributed as dist

from mimo.launch import ProcessInfo
from mimo.schedule import Action, ActionKind, ActorPlan, Plan
from mimo.schedule.runtime import Record, timer_of
from mimo.topology import Edge, StageId
from mimo.trainer.batch.saved_samples import KeptSamples
from mimo.trainer.batch.step_data import StepData
from mimo.trainer.cost.profile import (
    VERSION,
    EdgeTimes,
    LinearTime,
    PassTimes,
    Profile,
    StageTimes,
    digest,
    layout_of,
    machine,
)
from mimo.trainer.cost.sample_stats import lane_samples
from mimo.trainer.job.job import Job
from mimo.trainer.run.saved_bytes import SavedBytes, SavedBytesMode
from mimo.trainer.step.trainer import Trainer

_WARM_UP = 2
_STEPS = 7
"""Steps of each size and plan, of which the median counts."""
_MESSAGES = 20
_SMALL, _LARGE = 2**10, 2**20
"""Bytes of the two messages that tell latency and bandwidth."""

T = TypeVar("T")
Key: TypeAlias = tuple[StageId, ActionKind, tuple[int, ...], bool]
"""A stage, what it did, for which microbatches, and whether for a tied parameter."""


def profile_job(out: Path, job: Job, process: ProcessInfo) -> None:
    """Measure a job on this rank together with all others, and write the profile from the first one."""
    profile = measure_job(job, process)
    if process.rank == 0:
        out.write_text(profile.to_json(), encoding="utf-8")


def measure_job(job: Job, process: ProcessInfo) -> Profile:
    """Return what the computations and messages of a job take, the same on every rank."""
    process.heartbeat.enter("profile")
    split = split_backwards(job.plan)
    parts: list[Mapping[int, Mapping[Key, float]]] = []
    for plan in (split,) if split == job.plan else (job.plan, split):
        # A trainer of its own: where no weight gradients are deferred, layers are spared all that it takes.
        trainer = Trainer(
            attrs.evolve(job, plans=(plan,)),
            rank=process.rank,
            device=torch.device(process.device),
            progress=process.heartbeat,
            objects=process.objects,
        )
        parts.append({size: _measure(trainer, plan, samples(job, size)) for size in sizes(job)})
    seconds = {size: {key: took for part in reversed(parts) for key, took in part[size].items()} for size in sizes(job)}
    saved = _saved_bytes(trainer, split, samples(job, lane_samples(job)))
    return Profile(
        version=VERSION,
        machine=machine(process.device.partition(":")[0], torch.__version__),
        settings=digest(job),
        micro_batch=lane_samples(job),
        modules=layout_of(job),
        stages=tuple(_stage(job, stage, seconds, saved[stage]) for stage in job.graph.stages),
        edges=tuple(edge_times(job, edge, process) for edge in job.graph.edges),
    )


def sizes(job: Job) -> tuple[int, ...]:
    """Return the samples of a microbatch that are measured: 1, 2, 4 and so on up to the job's, at least two sizes."""
    configured = lane_samples(job)
    return tuple(sorted({*(2**power for power in range(configured.bit_length())), configured, 2}))


def samples(job: Job, size: int) -> StepData:
    """Return as many microbatches as the job's step has, of ``size`` samples for each language lane."""
    assert job.train is not None, "a profile is of training"
    run = attrs.evolve(job.settings.run, micro_batch=size)
    total = size * job.language.grid.dp * job.microbatches
    numbers = job.sample_order().read(0, total).tolist()
    kept = KeptSamples(numbers=numbers, base=job.train)  # decoded once, as training does that beside the step
    return StepData.cut(
        attrs.evolve(job, settings=attrs.evolve(job.settings, run=run)),
        kept,
        numbers,
        microbatches=job.microbatches,
        kept=kept,
    )  # by count: measured is how time grows with the samples of a lane


def split_backwards(plan: Plan) -> Plan:
    """Return the plan with every whole backward as two parts, one right after the other."""

    def parts(action: Action) -> tuple[Action, ...]:
        if action.kind != "backward":
            return (action,)
        return (attrs.evolve(action, kind="input-gradient"), attrs.evolve(action, kind="weight-gradient"))

    return attrs.evolve(
        plan,
        actors=tuple(
            ActorPlan(ranks=actor.ranks, actions=tuple(part for action in actor.actions for part in parts(action)))
            for actor in plan.actors
        ),
    )


def _measure(trainer: Trainer, plan: Plan, data: StepData) -> Mapping[Key, float]:
    """Return the median seconds of each computation and reduction of a plan, as its stage's ranks took them."""
    found: defaultdict[Key, list[float]] = defaultdict(list)
    for step in range(_WARM_UP + _STEPS):
        record = Record(timer=timer_of(trainer.device))
        dist.barrier(group=trainer.objects)
        trainer.measure(plan, data, record, first=not step)
        for moment in record.moments if step >= _WARM_UP else ():
            found[_key(moment.action)].append(moment.ended - moment.ready)
    return _together(trainer, plan, {key: statistics.median(values) for key, values in found.items()})


def _key(action: Action) -> Key:
    return (action.stage_id, action.kind, action.microbatches, action.edge is not None)


def _together(trainer: Trainer, plan: Plan, mine: Mapping[Key, float]) -> Mapping[Key, float]:
    """Return what each rank has found as one figure for a stage.

    Of ranks that wait for each other inside a computation the last to come waits least: its time is the computation's.
    Of lanes that don't, the slowest counts. A reduction is one meeting of all.
    """
    actions = (action for actor in plan.actors for action in actor.actions)
    keys = list(dict.fromkeys(_key(action) for action in actions if action.kind not in ("send", "receive")))
    own = torch.tensor([mine.get(key, math.nan) for key in keys], dtype=torch.float64, device=trainer.device)
    everyone = [torch.empty_like(own) for _ in range(trainer.job.world)]
    dist.all_gather(everyone, own)
    by_rank = torch.stack(everyone).tolist()
    found = {}
    for index, key in enumerate(keys):
        stage, kind, *_ = key
        ranks = trainer.job.graph.stage_ranks(stage)
        together = len(ranks) if kind == "reduce" else trainer.job.graph.by_name[stage.module].meeting_size
        found[key] = max(min(by_rank[rank][index] for rank in met) for met in _groups(ranks, together))
    return found


def _saved_bytes(trainer: Trainer, plan: Plan, data: StepData) -> Mapping[StageId, SavedBytes]:
    """Return what a microbatch keeps on the rank of each stage that keeps most."""
    trainer.measure(plan, data, Record(), first=True)
    record = Record()
    with SavedBytesMode(plan.actions_of(trainer.rank), record) as counted:
        trainer.measure(plan, data, record)
    by_pass: defaultdict[StageId, list[SavedBytes]] = defaultdict(list)
    for (stage, microbatches), saved in counted.by_pass().items():
        by_pass[stage].append(SavedBytes(*(count // len(microbatches) for count in attrs.astuple(saved))))
    stages = trainer.job.graph.stages
    width = len(attrs.fields(SavedBytes))
    own = torch.zeros(len(stages), width, dtype=torch.int64, device=trainer.device)
    for index, stage in enumerate(stages):
        # The first pass also makes what stays, gradients above all: the median leaves it out.
        if columns := list(zip(*map(attrs.astuple, by_pass[stage]), strict=True)):
            own[index] = torch.tensor([statistics.median_low(column) for column in columns])
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    return {stage: SavedBytes(*row) for stage, row in zip(stages, own.tolist(), strict=True)}


def edge_times(job: Job, edge: Edge, process: ProcessInfo) -> EdgeTimes:
    """Return what an edge carries and how fast, the same on every rank: one pair of its ranks tries two sizes."""
    size = _sent_bytes(job, edge)
    ends = job.graph.stage_ranks(edge.source), job.graph.stage_ranks(edge.target)
    pair = next(((one, other) for one in ends[0] for other in ends[1] if one != other), None)
    if pair is None:
        return EdgeTimes(name=edge.name, bytes=size)
    found = torch.zeros(2, dtype=torch.float64, device=process.device)
    if process.rank in pair:
        peer = sum(pair) - process.rank
        for index, message_bytes in enumerate((_SMALL, _LARGE)):
            message = torch.zeros(message_bytes, dtype=torch.uint8, device=process.device)
            found[index] = statistics.median(
                _round_trip(message, peer, first=process.rank == pair[0]) for _ in range(_MESSAGES)
            )
    dist.broadcast(found, src=pair[0])
    small, large = (found / 2).tolist()
    bandwidth = (_LARGE - _SMALL) / max(large - small, 1e-9)
    return EdgeTimes(name=edge.name, bytes=size, latency=max(small - _SMALL / bandwidth, 0.0), bandwidth=bandwidth)


def _round_trip(message: torch.Tensor, peer: int, *, first: bool) -> float:
    start = time.perf_counter()
    for send in (first, not first):
        (dist.send if send else dist.recv)(message, peer)
    if message.device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start


def _sent_bytes(job: Job, edge: Edge) -> float:
    """Return the bytes that a sample of a language lane sends between the two ranks that exchange most."""
    micro = lane_samples(job)
    data = samples(job, micro)
    most = [
        max(
            (
                piece.rows
                for rank in job.graph.stage_ranks(edge.source)
                for piece in batch.route(edge, rank).sends
                if piece.peer != rank
            ),
            default=0,
        )
        for batch in data.microbatches
    ]
    row_bytes = job.row_bytes(edge)
    return statistics.mean(most) * row_bytes / micro


def _stage(job: Job, stage: StageId, seconds: Mapping[int, Mapping[Key, float]], saved: SavedBytes) -> StageTimes:
    kinds: tuple[ActionKind, ...] = ("forward", "backward", "input-gradient", "weight-gradient")
    micro = lane_samples(job)
    largest = micro * max(len(passed) for passed in job.graph.by_name[stage.module].passes(job.microbatches))
    points = {kind: _points(stage, kind, seconds) for kind in kinds}
    lines = {kind: fit(found, at=largest) if found else None for kind, found in points.items()}
    forward = lines["forward"]
    assert forward is not None, stage
    reductions = {
        tied: [
            took
            for by_key in seconds.values()
            for (of, kind, _, of_tied), took in by_key.items()
            if (of, kind, of_tied) == (stage, "reduce", tied)
        ]
        for tied in (False, True)
    }
    return StageTimes(
        module=stage.module,
        stage=stage.stage,
        forward=forward,
        backward=lines["backward"],
        input_gradient=lines["input-gradient"],
        weight_gradient=lines["weight-gradient"],
        reduce=statistics.median(reductions[False] or [0.0]),
        reduce_tied=statistics.median(reductions[True] or [0.0]),
        activations=saved.activations / micro,
        recomputed=saved.recomputed / micro if job.graph.by_name[stage.module].recompute != "none" else 0.0,
        weight_inputs=saved.weight_inputs / micro,
        passes=tuple(
            PassTimes(
                samples=count,
                forward=points["forward"].get(count),
                backward=points["backward"].get(count),
                input_gradient=points["input-gradient"].get(count),
                weight_gradient=points["weight-gradient"].get(count),
            )
            for count in sorted(points["forward"])
        ),
    )


def _points(stage: StageId, kind: ActionKind, seconds: Mapping[int, Mapping[Key, float]]) -> Mapping[int, float]:
    """Return the mean seconds of the passes of a stage, by how many samples of a language lane they are over."""
    found: defaultdict[int, list[float]] = defaultdict(list)
    for size, by_key in seconds.items():
        for (of, done, microbatches, _), took in by_key.items():
            if of == stage and done == kind:
                found[size * len(microbatches)].append(took)
    return {count: statistics.mean(values) for count, values in found.items()}


def fit(points: Mapping[int, float], *, at: int) -> LinearTime:
    """Return the line through the point ``at`` that misses the others by least squares, nowhere below zero."""
    slope = 0.0
    if spread := sum((count - at) ** 2 for count in points):
        slope = max(sum((count - at) * (took - points[at]) for count, took in points.items()) / spread, 0.0)
    slope = min(slope, points[at] / at)
    return LinearTime(fixed=points[at] - slope * at, sample=slope)


def _groups(values: Sequence[T], size: int) -> list[Sequence[T]]:
    return [values[start : start + size] for start in range(0, len(values), size)]
