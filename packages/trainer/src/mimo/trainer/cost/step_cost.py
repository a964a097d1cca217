"""What a step of a job costs: measured, where ``schedule.profile`` names a profile, and by formula otherwise.

By formula a computation takes its operations divided by a speed, and a message its bytes divided by a bandwidth; both
are round figures of an accelerator. Only their ratios matter to a schedule. The bytes that optimizers send over data
lanes (`mimo.optimizer.estimates.SentBytes`) count as if nothing overlapped them: those of a step with the reduction,
those of a pass with that pass. Other collectives inside computations, and time that no multiplication takes, are left
out: to know seconds, measure them with ``mimo profile``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from mimo.model import EncoderSeam, EncoderSpec, GeneratorSpec, LanguageModelSpec, OpCost, Stage
from mimo.optimizer.estimates import Lanes, Numbers, SentBytes
from mimo.schedule import Costs, Link, Seconds, StageCost
from mimo.topology import Edge, Recompute, StageId
from mimo.trainer.config.settings import LANGUAGE
from mimo.trainer.cost.profile import read_profile
from mimo.trainer.cost.sample_stats import MadeStats, SampleStats, microbatch_samples
from mimo.trainer.job.job import NUMBER_BYTES, Job, JobModule, PartShare


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


def formula_costs(job: Job, stats: SampleStats | None = None) -> Costs:
    """Return what a step takes by formula, of samples like these; None: like the first ones of the first step."""
    speed, stats = _speed(job), stats or SampleStats.of(job)
    return Costs(
        stages={stage: stage_cost(job, stage, stats) for stage in job.graph.stages},
        message_bytes={edge.name: _message_bytes(job, edge, stats) for edge in job.graph.edges},
        link=Link(speed.latency, speed.bandwidth),
    )


def _speed(job: Job) -> Speed:
    return PROCESSOR if job.settings.run.device == "cpu" else ACCELERATOR


def stage_cost(job: Job, stage: StageId, stats: SampleStats) -> StageCost:
    """Return what a microbatch takes in one stage by formula, of samples like these."""
    speed, module = _speed(job), job.module(stage.module)
    grid = module.grid
    lane = _share(job, module, stats)
    seconds = lane / (grid.cp * grid.tp) / speed.operations
    split, copied = element_bytes(job, module, stats)
    forward = inputs = weights = repeated = saved = recomputed = operands = 0.0
    total, trained = OpCost(), OpCost()
    for _, work, trains, reached in op_costs_with_training(job, stage, stats):
        forward += work.forward
        total += work
        if trains:
            weights += work.weight_gradient
            operands += work.operands * split
            trained += work
        if reached:
            inputs += work.input_gradient
            repeated += work.repeated
            saved += work.split * split + work.copied * copied + paired_bytes(job, module, stats, work)
            recomputed = max(recomputed, work.recomputed * split)
    if module.divided:
        saved += rows_ahead(job, stage, stats)
    sent = _sent(job, module, trained, total)
    link = Link(speed.latency, speed.bandwidth)

    def seconds_of(size: float) -> float:
        return link.seconds(size) if size else 0

    return StageCost(
        forward=Seconds(seconds_of(sent.forward), forward * seconds),
        input_gradient=Seconds(seconds_of(sent.backward), inputs * seconds),
        weight_gradient=Seconds(seconds_of(sent.grad_accumulation), weights * seconds),
        recompute=Seconds(each=repeated * seconds),
        reduce=seconds_of(sent.step),
        activations=round(saved),
        recomputed=round(recomputed),
        weight_inputs=round(min(operands, saved + recomputed)),
    )


def element_bytes(job: Job, module: JobModule, stats: SampleStats) -> tuple[float, float]:
    """Return how many bytes a rank has, in a microbatch, of an element of all the samples.

    Of tensors that tensor ranks split, and of those that they split with sequence parallelism only.
    """
    lane = _share(job, module, stats) * NUMBER_BYTES[job.settings.run.precision] / module.grid.cp
    return lane / module.grid.tp, lane / module.slices


def paired_bytes(job: Job, module: JobModule, stats: SampleStats, work: OpCost) -> float:
    """Return how many bytes a rank has, in a microbatch, of tensors of all pairs of its rows."""
    rows = work.paired * _share(job, module, stats) / module.grid.cp
    return rows**2 * NUMBER_BYTES[job.settings.run.precision]


def _sent(job: Job, module: JobModule, trained: OpCost, total: OpCost) -> SentBytes:
    """Return what a rank sends over the data lanes of a stage, and of its experts over their own."""
    grid, choice = module.grid, module.optimizer
    shard_lanes = job.model_graph.by_name[module.name].shard_lanes
    number_bytes = NUMBER_BYTES[job.settings.run.precision]

    def numbers(of: Callable[[OpCost], int], ranks: int, lanes: int) -> Numbers:
        size = math.gcd(lanes, shard_lanes)
        held = Lanes(size=size, copies=lanes // size)
        return Numbers(trained=of(trained) / ranks, all=of(total) / ranks, number_bytes=number_bytes, lanes=held)

    dense = numbers(lambda work: work.weights - work.expert_weights, grid.tp, grid.dp * grid.cp)
    experts = numbers(lambda work: work.expert_weights, grid.ep * grid.etp, grid.edp)
    estimate = choice.spec.estimates.sent
    return estimate(dense, choice.config) + estimate(experts, choice.config)


def op_costs_with_training(job: Job, stage: StageId, stats: SampleStats) -> Iterator[tuple[str, OpCost, bool, bool]]:
    """Yield each part of a stage with its cost, whether it trains, and whether a gradient passes through it."""
    module = job.module(stage.module)
    reached = any(edge.gradient for edge in job.graph.inputs(stage))  # something upstream needs a gradient
    shares = module.shares[job.built(stage).stage] if module.shares else None
    for part, work in op_costs(job, stage, stats).items():
        if shares is None:
            trains = module.frozen is not True and (module.frozen is False or part not in module.frozen)
            reached = reached or trains
            yield part, work, trains, reached
            continue
        for own, trains in _divided(work, shares.get(part, PartShare(trained=0.0))):
            reached = reached or trains
            yield part, own, trains, reached


def _divided(work: OpCost, share: PartShare) -> Iterator[tuple[OpCost, bool]]:
    """Yield the trained share of a part's cost with True, and the rest with False.

    LoRA's products are counted with as many rows as the part's own weights have on average.
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


def op_costs(
    job: Job, stage: StageId, stats: SampleStats, *, recompute: Recompute | None = None
) -> Mapping[str, OpCost]:
    """Return what a forward of a stage over the samples costs, by part in the order in which data passes them.

    Args:
        job: the whole.
        stage: of one of its modules.
        stats: of the samples.
        recompute: what its backward computes again; None: as the run has it.
    """
    module = job.module(stage.module)
    recompute = recompute or job.graph.by_name[stage.module].recompute
    plugin_stage = job.stage(job.built(stage))
    if isinstance(module.spec, EncoderSpec):
        sizes = stats.sizes_of(module)
        if module.spec.flops is not None:
            costs = module.spec.flops(module.config, job.row_width(module), plugin_stage.pipeline, recompute, sizes)
            return (
                costs
                if module.spec.seam is None or not plugin_stage.seam
                else _own_side(costs, module.spec.seam, plugin_stage)
            )
        rows = sum(module.spec.rows(module.config, size) for size in sizes)
        return _from_shapes(job, module, plugin_stage, rows, recompute)
    if isinstance(module.spec, GeneratorSpec):
        made, spec = stats.made.get(module.name, MadeStats()), module.spec
        if spec.flops is not None:
            return spec.flops(module.config, job.row_width(module), plugin_stage, recompute, made.sizes, made.rows)
        rows = sum(spec.targets(module.config, size) for size in made.sizes)
        return _from_shapes(job, module, plugin_stage, rows, recompute)
    own = stats.of_module(module)
    if module.spec.flops is not None:
        labels = own.labels if module.distil is None or module.sends_ids else 0  # of rows that it makes logits of
        costs = module.spec.flops(module.config, plugin_stage, recompute, own.lengths, labels)
        depths = {"next_tokens": module.spec.next_tokens(module.config)}
        teachers = job.teachers if module.name == LANGUAGE else ()
        compared = 1 + sum(teacher.sends_ids for teacher in teachers)
        found = {
            part: _with_logits(job, module, stats, work, depths[part], 1)
            if part in depths
            else _with_logits(job, module, stats, work, 1, compared)
            for part, work in costs.items()
        }
        of_hidden = [one for one in teachers if one.distil is not None and one.distil.compares_hidden]
        if plugin_stage.is_last and of_hidden:
            *_, last = found
            found[last] += _of_hidden_rows(job, module, of_hidden, stats)
        return found
    return _from_shapes(job, module, plugin_stage, sum(own.lengths), recompute)


def _with_logits(job: Job, module: JobModule, stats: SampleStats, work: OpCost, losses: int, compared: int) -> OpCost:
    """Return a cost with the logits that its losses keep, or make once more a few rows at a time.

    Args:
        job: the whole.
        module: a language model.
        stats: of the samples.
        work: of one of its parts.
        losses: how often it makes logits of all rows.
        compared: with how much each of these logits is compared: labels and teachers.
    """
    if not work.logits:
        return work
    assert isinstance(module.spec, LanguageModelSpec)
    fp32 = NUMBER_BYTES["fp32"] / NUMBER_BYTES[job.settings.run.precision]
    chunk = module.loss_rows * module.spec.vocabulary(module.config) * module.grid.cp / _share(job, module, stats)
    if not 0 < chunk < work.logits / losses:
        return attrs.evolve(work, logits=0.0, split=work.split + fp32 * compared * work.logits)
    again = 2.0 * module.spec.hidden(module.config) * work.logits
    recomputed = max(work.recomputed, fp32 * compared * chunk)
    return attrs.evolve(work, logits=0.0, repeated=work.repeated + again, recomputed=recomputed)


def _of_hidden_rows(job: Job, student: JobModule, teachers: Sequence[JobModule], stats: SampleStats) -> OpCost:
    """Return what a student keeps for its backward by reason of hidden rows.

    Those of each teacher, as they came and once more by themselves, and in fp32 what they are compared by: the
    differences, or the student's own rows. The backward makes the gradient of one comparison at a time.

    Args:
        job: the whole.
        student: the language model.
        teachers: of hidden rows, at least one.
        stats: of the samples.
    """
    assert isinstance(student.spec, LanguageModelSpec)
    fp32 = NUMBER_BYTES["fp32"] / NUMBER_BYTES[job.settings.run.precision]
    rows = [float(student.spec.hidden(student.config) * stats.of_module(teacher).labels) for teacher in teachers]
    # Beside ids each tensor rank gets all hidden rows, otherwise those of its slice.
    got = sum(each * (student.slices if one.sends_ids else 1) for each, one in zip(rows, teachers, strict=True))
    in_split = student.grid.tp / student.slices  # `working` counts what tensor ranks split, `copied` what slices do
    return OpCost(copied=2 * got + fp32 * sum(rows), working=fp32 * in_split * max(rows))


def _own_side(costs: Mapping[str, OpCost], seam: EncoderSeam, stage: Stage) -> Mapping[str, OpCost]:
    """Return the costs of the parts that lie on the stage's side of the seam."""
    return {part: work for part, work in costs.items() if (part in seam.parts) == stage.is_projector}


def _from_shapes(job: Job, module: JobModule, stage: Stage, rows: int, recompute: Recompute) -> Mapping[str, OpCost]:
    from mimo.trainer.cost.from_shapes import op_costs_from_shapes  # imports torch

    return op_costs_from_shapes(module, stage, hidden=job.row_width(module), rows=rows, recompute=recompute)


def _share(job: Job, module: JobModule, stats: SampleStats) -> float:
    """Return the fraction of the cost of all the samples that one lane has, on average, in a microbatch.

    The padding counts like other rows.
    """
    share = microbatch_samples(job, stats) / module.grid.dp / len(stats.lengths)
    rows, multiple = sum(stats.lengths) * share / module.grid.cp, module.round_rows * module.slices
    return share if multiple == 1 or not rows else share * math.ceil(rows / multiple) * multiple / rows


def rows_ahead(job: Job, stage: StageId, stats: SampleStats) -> float:
    """Return about how many bytes of a microbatch's rows a rank holds for the next step; 0 without prefetch."""
    modules, module = job.graph.by_name, job.module(stage.module)
    if not modules[stage.module].prefetch:
        return 0.0
    handed_on = [edge for edge in job.graph.outputs(stage) if not modules[edge.target.module].prefetch]
    total = sum(_rows(job, edge, module, stats) * job.row_bytes(edge) for edge in handed_on)
    return total * _share(job, module, stats) / _cuts(module)


def _message_bytes(job: Job, edge: Edge, stats: SampleStats) -> int:
    """Return about how many bytes a microbatch sends along an edge between two ranks; 0 where they are the same."""
    if set(job.graph.stage_ranks(edge.source)) == set(job.graph.stage_ranks(edge.target)):
        return 0
    source, target = job.module(edge.source.module), job.module(edge.target.module)
    ends = (source,) if source is target else (source, target)
    lanes = max(end.grid.dp for end in ends)
    # Tensor ranks share the sending where they all hold the rows, and so do those that receive.
    cuts = _cuts(source) if source is target else max(end.grid.cp * end.grid.tp for end in ends)
    samples = microbatch_samples(job, stats) / len(stats.lengths)
    rows = _rows(job, edge, source, stats) * samples / lanes / cuts
    return round(rows * job.row_bytes(edge))


def _cuts(module: JobModule) -> int:
    """Return into how many slices the rows between the stages of a module are cut."""
    return module.grid.cp * module.slices


def _rows(job: Job, edge: Edge, source: JobModule, stats: SampleStats) -> int:
    if (generator := job.module(edge.target.module)).is_generator:
        made = stats.made.get(generator.name, MadeStats())
        if not job.is_inside(edge):
            return made.sent.get(source.name, 0)
        return sum(job.message_rows(edge, *of_item) for of_item in zip(made.sizes, made.rows, strict=True))
    if isinstance(source.spec, LanguageModelSpec):
        own = stats.of_module(source)
        return own.labels if job.teaches(edge) else sum(own.lengths)
    assert isinstance(source.spec, EncoderSpec), source.name
    sizes: Sequence[tuple[int, ...]] = stats.sizes_of(source)
    if not job.is_inside(edge):
        return sum(source.spec.rows(source.config, size) for size in sizes)
    return sum(job.message_rows(edge, size) for size in sizes)
