"""Bytes of activations that each rank holds at most: what its plan has in flight, and what a backward takes besides."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from mimo.schedule import ActorPeak, Costs, StageCost, in_flight, peak_activations
from mimo.topology import StageId
from mimo.trainer.cost.sample_stats import SampleStats
from mimo.trainer.cost.step_cost import (
    element_bytes,
    formula_costs,
    job_costs,
    op_costs,
    op_costs_with_training,
    paired_bytes,
    stage_cost,
)
from mimo.trainer.job.job import NUMBER_BYTES, Job


def activation_costs(job: Job) -> Costs:
    """Return bytes of activations by stage: from the job's profile, or by formula, of its largest microbatches.

    By formula, where a stage has several in flight, they are the average of the largest that follow one another, and
    recomputed bytes are all that a backward takes besides. Rows that are made a step ahead are left out. What a stage
    without backward takes while it runs is by formula in any case.
    """
    flying = in_flight(job.plans[-1])
    largest = SampleStats.of_largest(job, {1, *flying.values()})
    stats = largest[1]
    if job.settings.schedule.profile:
        costs = job_costs(job)
    else:
        costs = formula_costs(job, stats)
        stages = {stage: _with_working(job, stage, stats, cost) for stage, cost in costs.stages.items()}
        for stage, count in flying.items():
            if count > 1:
                saved = stage_cost(job, stage, largest[count]).activations
                stages[stage] = attrs.evolve(stages[stage], activations=saved)
        costs = attrs.evolve(costs, stages=stages).trained(job.graph)
    stages = {stage: _without_rows_ahead(job, stage, costs) for stage in job.graph.stages}
    for stage in stages:
        if not job.graph.runs_backward(stage):
            stages[stage] = attrs.evolve(stages[stage], passing=_passing(job, stage, stats))
    return attrs.evolve(costs, stages=stages)


def most_activations(job: Job, costs: Costs) -> Mapping[int, ActorPeak]:
    """Return the most that each rank holds of its activations, in the job's longest step."""
    return peak_activations(job.plans[-1], job.graph, costs)


def _with_working(job: Job, stage: StageId, stats: SampleStats, cost: StageCost) -> StageCost:
    """Return the cost of a stage whose backward, part by part, frees what it has gone through.

    Its recomputed bytes are what it holds at most beyond all that the forward has saved.
    """
    module = job.module(stage.module)
    grid, number = module.grid, NUMBER_BYTES[job.settings.run.precision]
    split, copied = element_bytes(job, module, stats)
    saved = most = 0.0
    for _, work, trains, reached in op_costs_with_training(job, stage, stats):
        if not reached:
            continue
        saved += work.split * split + work.copied * copied + paired_bytes(job, module, stats, work)
        weight = work.largest / (grid.ep * grid.etp if work.expert_weights else grid.tp) * number if trains else 0.0
        most = max(most, saved + work.recomputed * split + max(work.working * split, weight))
    return attrs.evolve(cost, recomputed=round(max(most - saved, 0.0)))


def _without_rows_ahead(job: Job, stage: StageId, costs: Costs) -> StageCost:
    cost = costs.stages[stage]
    return attrs.evolve(cost, activations=0) if job.graph.by_name[stage.module].prefetch else cost


def _passing(job: Job, stage: StageId, stats: SampleStats) -> int:
    """Return the most bytes that a forward takes while it runs, of which nothing is kept for a backward.

    One layer runs at a time and makes what recomputing it would bring back, split over tensor ranks like all that the
    layers would save; a teacher's head makes logits. What a layer is must be known: 0 where the plugin names none.
    """
    module, most = job.module(stage.module), 0.0
    if "full" not in module.spec.recompute:
        return 0
    split, copied = element_bytes(job, module, stats)
    saved = op_costs(job, stage, stats, recompute="none")
    for part, work in op_costs(job, stage, stats, recompute="full").items():
        whole = saved[part]
        if elements := whole.split + whole.copied:
            each = (whole.split * split + whole.copied * copied) / elements
            pairs = paired_bytes(job, module, stats, work)
            most = max(most, work.recomputed * each + work.split * split + pairs)
    return round(most)
