"""What a step of a job costs: measured, where ``schedule.profile`` names a profile, and by formula otherwise.

By formula a computation takes its operations over a speed, a message its bytes over a bandwidth, both those of some
accelerator. Only their ratios matter to a schedule. What optimizers send over data lanes is counted where they send it
(`mimo.optimizer.estimates.SentBytes`), as if nothing were computed meanwhile: what is gathered or reduced once a step
with the reduction, what each pass sends with that pass. Other collectives inside computations, and whatever takes time
without multiplying, are left out: to know seconds, measure them with ``mimo profile``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from mimo.model import EncoderSeam, EncoderSpec, LanguageModelSpec, OpCost, Stage
from mimo.optimizer.estimates import Lanes, Numbers, SentBytes
from mimo.schedule import Costs, Link, Seconds, StageCost
from mimo.topology import Edge, StageId
from mimo.trainer.cost.profile import read_profile
from mimo.trainer.cost.sample_stats import Typical
from mimo.trainer.job.job import Job, JobModule, PartShare
from mimo.trainer.job.precision import NUMBER_BYTES


@attrs.frozen(kw_only=True)
class Speed:
    """How fast a rank is.

    Args:
        operations: that it does in a second, two for a multiplication and an addition.
        bandwidth: bytes a second between two ranks.
        latency: seconds before the first byte of a message arrives.
    """

    operations: float
    bandwidth: float
    latency: float


ACCELERATOR = Speed(operations=1e14, bandwidth=5e10, latency=5e-6)
"""A round figure of an accelerator of the years 2020 to 2026, and of the network of a node beside it."""
PROCESSOR = Speed(operations=5e10, bandwidth=3e9, latency=1e-4)
"""A round figure of one core, and of gloo between two processes of a machine; where ``run.device`` is ``cpu``."""


def job_costs(job: Job) -> Costs:
    """Return what a step of ``job`` costs, from its profile or by formula; the job's plans are not looked at.

    Raises:
        ConfigError: the profile can't be read, or is of another job.
    """
    profile = job.settings.schedule.profile
    costs = read_profile(Path(profile), job) if profile else formula_costs(job)
    return costs.trained(job.graph)


def formula_costs(job: Job) -> Costs:
    """Return what a step takes by formula, of samples like the first ones of the first step."""
    speed = PROCESSOR if job.settings.run.device == "cpu" else ACCELERATOR
    typical = Typical.of(job)
    return Costs(
        stages={stage: _stage(job, stage, typical, speed) for stage in job.graph.stages},
        message_bytes={edge.name: _message_bytes(job, edge, typical) for edge in job.graph.edges},
        link=Link(speed.latency, speed.bandwidth),
    )


def _stage(job: Job, stage: StageId, typical: Typical, speed: Speed) -> StageCost:
    module = job.module(stage.module)
    grid = module.grid
    lane = _share(job, module, typical)
    seconds = lane / (grid.cp * grid.tp) / speed.operations
    number = NUMBER_BYTES[job.settings.run.precision]
    split = lane * number / (grid.cp * grid.tp)
    copied = lane * number / (grid.cp * (grid.tp if module.sequence_parallel else 1))
    forward = inputs = weights = repeated = kept = recomputed = operands = 0.0
    everything, trained = OpCost(), OpCost()
    for _, work, trains, reached in passed(job, stage, typical):
        forward += work.forward
        everything += work
        if trains:
            weights += work.weight_gradient
            operands += work.operands * split
            trained += work
        if reached:
            inputs += work.input_gradient
            repeated += work.repeated
            kept += work.split * split + work.copied * copied
            recomputed = max(recomputed, work.recomputed * split)
    if module.divided:
        kept += rows_ahead(job, stage, typical)
    sent = _sent(job, module, trained, everything)
    link = Link(speed.latency, speed.bandwidth)

    def taken(size: float) -> float:
        return link.seconds(size) if size else 0

    return StageCost(
        forward=Seconds(taken(sent.forward), forward * seconds),
        input_gradient=Seconds(taken(sent.backward), inputs * seconds),
        weight_gradient=Seconds(taken(sent.adding), weights * seconds),
        recompute=Seconds(each=repeated * seconds),
        reduce=taken(sent.step),
        activations=round(kept),
        recomputed=round(recomputed),
        weight_inputs=round(min(operands, kept + recomputed)),
    )


def _sent(job: Job, module: JobModule, trained: OpCost, everything: OpCost) -> SentBytes:
    """Return what a rank sends over the data lanes of a stage, and of its experts over their own."""
    grid, choice = module.grid, module.optimizer
    shard_lanes = job.model_graph.by_name[module.name].shard_lanes
    number_bytes = NUMBER_BYTES[job.settings.run.precision]

    def numbers(of: Callable[[OpCost], int], ranks: int, lanes: int) -> Numbers:
        size = math.gcd(lanes, shard_lanes)
        held = Lanes(size=size, copies=lanes // size)
        return Numbers(trained=of(trained) / ranks, all=of(everything) / ranks, number_bytes=number_bytes, lanes=held)

    dense = numbers(lambda work: work.weights - work.expert_weights, grid.tp, grid.dp * grid.cp)
    experts = numbers(lambda work: work.expert_weights, grid.ep * grid.etp, grid.edp)
    tell = choice.spec.estimates.sent
    return tell(dense, choice.config) + tell(experts, choice.config)


def passed(job: Job, stage: StageId, typical: Typical) -> Iterator[tuple[str, OpCost, bool, bool]]:
    """Yield the parts of a stage with what their forward takes, whether they train, and whether a gradient comes by."""
    module = job.module(stage.module)
    reached = any(edge.gradient for edge in job.graph.inputs(stage))  # whether anything up to here needs a gradient
    shares = module.shares[job.built(stage).stage] if module.shares else None
    for part, work in works(job, stage, typical).items():
        if shares is None:
            trains = module.frozen is not True and (module.frozen is False or part not in module.frozen)
            reached = reached or trains
            yield part, work, trains, reached
            continue
        for own, trains in _divided(work, shares.get(part, PartShare(trained=0.0))):
            reached = reached or trains
            yield part, own, trains, reached


def _divided(work: OpCost, share: PartShare) -> Iterator[tuple[OpCost, bool]]:
    """Yield of a part's work that of what is trained and that of what is not, by numbers, and whether it is.

    What LoRA adds is multiplied with as many rows as the part's own weights are on average.
    """
    own, rows = share.trained, work.weighted / (2.0 * work.weights) if work.weights else 0.0
    weights, experts = round(own * work.weights), round(own * work.expert_weights)
    trained = OpCost(
        weighted=own * work.weighted + 2.0 * rows * share.added,
        of_items=own * work.of_items,
        split=rows * share.operands,
        operands=own * work.operands + rows * share.operands,
        weights=weights + share.added,
        expert_weights=experts,
    )
    if own or share.added:
        yield trained, True
    yield (
        attrs.evolve(
            work,
            weighted=(1 - own) * work.weighted,
            of_items=(1 - own) * work.of_items,
            operands=(1 - own) * work.operands,
            weights=work.weights - weights,
            expert_weights=work.expert_weights - experts,
        ),
        False,
    )


def works(job: Job, stage: StageId, typical: Typical) -> Mapping[str, OpCost]:
    """Return by part, in the order in which data passes them, what a forward of a stage takes over typical samples."""
    module, cut = job.module(stage.module), job.graph.by_name[stage.module]
    at = job.stage(job.built(stage))
    if isinstance(module.spec, EncoderSpec):
        sizes = typical.sizes.get(module.modality, ())
        if module.spec.flops is not None:
            found = module.spec.flops(module.config, job.hidden, at.pipeline, cut.recompute, sizes)
            return found if module.spec.seam is None or not at.seam else _beside(found, module.spec.seam, at)
        return _guess(job, module, at, sum(module.spec.rows(module.config, size) for size in sizes))
    if module.spec.flops is not None:
        return module.spec.flops(module.config, at, cut.recompute, typical.lengths, typical.labels)
    return _guess(job, module, at, sum(typical.lengths))


def _beside(found: Mapping[str, OpCost], seam: EncoderSeam, stage: Stage) -> Mapping[str, OpCost]:
    """Return of the work of a pipeline stage what lies on the side of the seam on which a stage does."""
    return {part: work for part, work in found.items() if (part in seam.parts) == stage.is_projector}


def _guess(job: Job, module: JobModule, stage: Stage, rows: int) -> Mapping[str, OpCost]:
    from mimo.trainer.cost.flops_from_shapes import guess_work  # it builds the stranger's module, with torch

    return guess_work(module, stage, hidden=job.hidden, rows=rows)


def _share(job: Job, module: JobModule, typical: Typical) -> float:
    """Return how much of what the typical samples take a lane takes on, on average, for a microbatch."""
    samples = job.settings.run.micro_batch * job.language.grid.dp
    return samples / module.grid.dp / len(typical.lengths)


def rows_ahead(job: Job, stage: StageId, typical: Typical) -> float:
    """Return about how many bytes of a microbatch's rows a rank of a stage keeps for the next step; 0 in its own."""
    modules, module = job.graph.by_name, job.module(stage.module)
    if not modules[stage.module].prefetch:
        return 0.0
    handed_on = [edge for edge in job.graph.outputs(stage) if not modules[edge.target.module].prefetch]
    numbers = sum(_rows(job, edge, module, typical) * job.width(edge) for edge in handed_on)
    share = _share(job, module, typical) / _cuts(module)
    return numbers * share * NUMBER_BYTES[job.settings.run.precision]


def _message_bytes(job: Job, edge: Edge, typical: Typical) -> int:
    """Return about how many bytes a microbatch sends along an edge between two ranks; 0 where they are the same."""
    if set(job.graph.stage_ranks(edge.source)) == set(job.graph.stage_ranks(edge.target)):
        return 0
    source, target = job.module(edge.source.module), job.module(edge.target.module)
    ends = (source,) if source is target else (source, target)
    lanes = max(end.grid.dp for end in ends)
    # Tensor ranks share the sending where they all hold the rows, and so do those that receive.
    cuts = _cuts(source) if source is target else max(end.grid.cp * end.grid.tp for end in ends)
    samples = job.settings.run.micro_batch * job.language.grid.dp / len(typical.lengths)
    rows = _rows(job, edge, source, typical) * samples / lanes / cuts
    return round(rows * job.width(edge) * NUMBER_BYTES[job.settings.run.precision])


def _cuts(module: JobModule) -> int:
    """Return into how many slices the rows between the stages of a module are cut."""
    return module.grid.cp * (module.grid.tp if module.sequence_parallel else 1)


def _rows(job: Job, edge: Edge, source: JobModule, typical: Typical) -> int:
    if isinstance(source.spec, LanguageModelSpec):
        return sum(typical.lengths)
    sizes: Sequence[tuple[int, ...]] = typical.sizes.get(source.modality, ())
    if not job.is_inside(edge):
        return sum(source.spec.rows(source.config, size) for size in sizes)
    return sum(job.message_rows(edge, size) for size in sizes)
