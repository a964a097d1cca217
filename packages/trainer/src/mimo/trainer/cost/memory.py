"""Bytes of parameters, gradients and optimizer state that each rank will hold, from shapes; nothing is allocated.

This file computes the shapes. Optimizer plugins estimate the bytes of these shapes over data lanes and of their
state (`mimo.optimizer.estimates`), called as `mimo.optimizer.runtime.ModuleOptimizer` calls them for real tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import attrs
import torch
from torch import nn

from mimo.model import LanguageModelSpec
from mimo.model.runtime import ExpertAxis, Split, TensorAxis, attach_lora, build_stage, create_on, trainable_paths
from mimo.optimizer.estimates import LaidBytes, Lanes, ParameterShape, PartShapes, SteppedShapes
from mimo.optimizer.runtime import layers
from mimo.schedule import Costs, in_flight
from mimo.topology import StageId
from mimo.trainer.cost.activations import activation_costs, most_activations
from mimo.trainer.cost.sample_stats import SampleStats
from mimo.trainer.cost.step_cost import rows_ahead
from mimo.trainer.job.job import NUMBER_BYTES, Job, JobModule


@attrs.frozen(kw_only=True)
class RankMemory:
    """Bytes that a rank holds beside messages on their way, the most at one time of each kind.

    Rows that are made a step ahead are held from step to step, and so are here.

    Args:
        weights: parameters in fp32, or its pieces of them.
        gathered: what layers compute with, where that is not these.
        gradients: of all that trains.
        state: of optimizers, on the device.
        ahead: rows made for the next step by what works ahead, and of this step's those not yet used: about as many
            bytes, as samples differ.
        activations: saved for backwards and made by them, of the largest microbatches of samples like the first ones.
        in_turn: of gradients and activations, what is never there at once: gradients that a backward adds take the
            place of activations that it frees.
        host: of optimizers, in host memory.
        at_most: whether the run decides what of the state lies where.
    """

    weights: int = 0
    gathered: int = 0
    gradients: int = 0
    state: int = 0
    ahead: int = 0
    activations: int = 0
    in_turn: int = 0
    host: int = 0
    at_most: bool = False

    @property
    def device(self) -> int:
        """All that lies on the device at one time."""
        held = self.weights + self.gathered + self.gradients + self.state + self.ahead
        return held + self.activations - self.in_turn

    def __add__(self, other: RankMemory) -> RankMemory:
        """Return what both take."""
        return RankMemory(
            weights=self.weights + other.weights,
            gathered=self.gathered + other.gathered,
            gradients=self.gradients + other.gradients,
            state=self.state + other.state,
            ahead=self.ahead + other.ahead,
            activations=self.activations + other.activations,
            in_turn=self.in_turn + other.in_turn,
            host=self.host + other.host,
            at_most=self.at_most or other.at_most,
        )


def estimate_memory(job: Job) -> Mapping[int, RankMemory]:
    """Return what each rank that holds a module will hold; where ``run.device`` is ``auto``, as on an accelerator."""
    estimate = _Estimate(job)
    return {
        rank: estimate.of_rank(rank, [module.name for module in job.modules if rank in module.grid])
        for rank in job.graph.ranks
    }


def estimate_modules(job: Job, rank: int) -> Mapping[str, RankMemory]:
    """Return what a rank will hold of each of its modules, the most at one time of each by itself."""
    estimate = _Estimate(job)
    return {module.name: estimate.of_rank(rank, [module.name]) for module in job.modules if rank in module.grid}


class _Estimate:
    """What the ranks of a job will hold; what several of them share is computed once."""

    def __init__(self, job: Job) -> None:
        self._job, self._shapes, self._ahead, self._costs = job, _Shapes(job), _made_ahead(job), activation_costs(job)
        self._activations = most_activations(job, self._costs)

    def of_rank(self, rank: int, names: Sequence[str]) -> RankMemory:
        """Return what a rank holds of these of its modules."""
        job, peak = self._job, self._activations[rank]
        alone = sum(one.bytes for part, one in peak.modules.items() if job.module(part).name in names)
        held = _of_rank(job, rank, names, self._shapes, self._costs)
        ahead = sum(self._ahead.get((rank, name), 0) for name in names)
        return held + RankMemory(ahead=ahead, activations=min(alone, peak.bytes))


def _made_ahead(job: Job) -> Mapping[tuple[int, str], int]:
    """Return the most bytes by rank and module of rows that are made a step ahead, of samples like the first ones."""
    found: dict[tuple[int, str], int] = {}
    if not any(module.prefetch for module in job.graph.modules):
        return found
    samples, saved = SampleStats.of(job), in_flight(job.plans[-1])
    for stage in job.graph.stages:
        if each := rows_ahead(job, stage, samples):
            for rank in job.graph.stage_ranks(stage):
                key = rank, job.module(stage.module).name
                found[key] = found.get(key, 0) + round(each * saved[stage])
    return found


def _freed(job: Job, rank: int, costs: Costs) -> int:
    """Return the least that a backward of any stage of a rank frees of activations."""
    stages = (stage for stage in job.graph.role(rank).stages if job.graph.runs_backward(stage))
    return min((costs.stages[stage].activations for stage in stages), default=0)


_Part: TypeAlias = frozenset[int]
"""The stages of a module that hold a parameter: what several share is laid out by itself."""


def _of_rank(job: Job, rank: int, names: Sequence[str], shapes: _Shapes, costs: Costs) -> RankMemory:
    found = [_laid(job, rank, name, shapes) for name in names]
    laid = [one for module in found for one in module.values()]
    computing = [
        [one for stages, one in module.items() if stage in stages]
        for module in found
        for stage in frozenset[int]().union(*module)
    ]  # one stage at a time
    # Of a backward in two parts, what the first has added waits for the second, and other stages compute meanwhile.
    splits = any(action.kind == "input-gradient" for plan in job.plans for action in plan.actions_of(rank))
    gathered = max((sum(one.gathered_inside for one in some) for some in computing), default=0)
    at_once = [laid] if splits else computing
    gradients = max((sum(one.gradients_inside for one in some) for some in at_once), default=0)
    memory = RankMemory(
        in_turn=0 if splits else min(gradients, _freed(job, rank, costs)),
        weights=sum(one.weights for one in laid),
        gathered=gathered + sum(one.gathered for one in laid),
        gradients=gradients + sum(one.gradients for one in laid),
    )
    for name, module in zip(names, found, strict=True):
        memory += _state(job, name, [piece for one in module.values() for piece in one.pieces])
    return memory


def _laid(job: Job, rank: int, name: str, shapes: _Shapes) -> Mapping[_Part, LaidBytes]:
    """Return how the parameters of a module lie on a rank, by the stages that hold them."""
    module, cut = job.module(name), job.model_graph.by_name[name]
    grid, place = module.grid, module.grid.coordinates(rank)
    held = cut.stages_at(place.pp)
    part = PartShapes(
        parameters=(),
        lanes=_lanes(grid.dp * grid.cp, place.dp * grid.cp + place.cp, cut.shard_lanes),
        expert_lanes=_lanes(grid.edp, grid.expert_coordinates(rank).edp, cut.shard_lanes),
        number_bytes=NUMBER_BYTES[job.settings.run.precision],
    )
    choice = module.optimizer
    return {
        stages: choice.spec.estimates.laid(attrs.evolve(part, parameters=own), choice.config)
        for stages, own in _parts({stage: shapes.of(rank, module, stage) for stage in held}).items()
    }


def _state(job: Job, name: str, pieces: Iterable[ParameterShape]) -> RankMemory:
    """Return what the optimizers of a module hold, one for each rule that any of its parameters follows."""
    by_name, found = {piece.name: piece for piece in pieces}, RankMemory()
    for rule, names in job.module(name).optimizer.rules.split(by_name):
        stepped = SteppedShapes(
            pieces=tuple(by_name[one] for one in names), on_accelerator=job.settings.run.device != "cpu"
        )
        state = rule.spec.estimates.state(stepped, rule.config)
        found += RankMemory(state=state.device, host=state.host, at_most=state.at_most)
    return found


def _parts(stages: Mapping[int, Iterable[ParameterShape]]) -> Mapping[_Part, tuple[ParameterShape, ...]]:
    """Return the parameters of a rank's stages by the stages that hold them; what several share is of no layer."""
    holders: dict[str, _Part] = {}
    for stage, own in stages.items():
        for one in own:
            holders[one.name] = holders.get(one.name, frozenset()) | {stage}
    parts: dict[_Part, dict[str, ParameterShape]] = {}
    for own in stages.values():
        for one in own:
            held_by = holders[one.name]
            parts.setdefault(held_by, {})[one.name] = attrs.evolve(one, layer=None) if len(held_by) > 1 else one
    return {held_by: tuple(own.values()) for held_by, own in parts.items()}


def _lanes(count: int, index: int, shard_lanes: int) -> Lanes:
    """Return how data lanes are divided, by `mimo.topology.Module.shard_lanes`, as one sees it; experts may have fewer.

    Args:
        count: of the lanes.
        index: of the one.
        shard_lanes: over how many neighbours a copy is to be spread, 0 for all.
    """
    size = math.gcd(count, shard_lanes)
    return Lanes(size=size, index=index % size, copies=count // size)


class _Shapes:
    """The parameters of stages as ranks hold them; ranks that hold the same pieces share the work."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._found: dict[tuple[object, ...], tuple[ParameterShape, ...]] = {}

    def of(self, rank: int, module: JobModule, stage: int) -> tuple[ParameterShape, ...]:
        """Return those of a stage on a rank, in order."""
        place, experts = module.grid.coordinates(rank), ExpertAxis.of(module.grid, rank)
        key = (module.name, stage, place.tp, experts.ep_rank, experts.etp_rank)
        if key not in self._found:
            axis = TensorAxis(rank=place.tp, size=module.grid.tp, sequence_parallel=module.sequence_parallel)
            self._found[key] = tuple(self._make(module, stage, axis, experts))
        return self._found[key]

    def _make(self, module: JobModule, stage: int, axis: TensorAxis, experts: ExpertAxis) -> Iterator[ParameterShape]:
        spec, cut = module.spec, self._job.model_graph.by_name[module.name]
        built = self._build(module, stage)
        others = [other for other in cut.tied_stages if other != stage] if stage in cut.tied_stages else []
        tied = {path for other in others for path, _ in self._build(module, other).named_parameters()}
        splits = {} if spec.tensor is None else dict(spec.tensor.plan(built, axis))
        changes = isinstance(spec, LanguageModelSpec) and spec.experts is not None
        if isinstance(spec, LanguageModelSpec) and spec.experts is not None:
            splits |= spec.experts.plan(built, experts)
        splits = attach_lora(built, module.lora, splits)
        trained = trainable_paths(spec, built, frozen=module.frozen, lora=module.lora)
        numbers = _layer_numbers(built)
        for path, parameter in built.named_parameters():
            split = splits.get(path, Split())
            floating, learns = parameter.is_floating_point(), parameter.requires_grad
            cuts = 1 if split.dim is None else experts.etp if split.experts else axis.size
            yield ParameterShape(
                name=f"{module.name}.{path}",
                shape=tuple(split.piece(parameter, experts if split.experts else axis).shape),
                ranks=cuts * (experts.ep if split.experts else 1),
                total=parameter.numel(),
                trained=cut.trains[stage] and path in trained,
                number_bytes=torch.float32.itemsize if floating else parameter.element_size(),
                floating=floating,
                layer=numbers[parameter],
                experts=split.experts,
                tied=path in tied,
                whole=changes and not learns,
            )

    def _build(self, module: JobModule, stage: int) -> nn.Module:
        built = self._job.stage(StageId(module.name, stage))
        with create_on("meta"):
            return build_stage(module.spec, module.config, built, self._job.row_width(module))


def _layer_numbers(stage: nn.Module) -> Mapping[nn.Parameter, int | None]:
    """Return the number of the layer that alone holds each parameter of a stage; None for none or several."""
    layer_of = {part: number for number, layer in enumerate(layers(stage)) for part in layer.modules()}
    holders: dict[nn.Parameter, set[int | None]] = {}
    for part in stage.modules():
        for parameter in part.parameters(recurse=False):
            holders.setdefault(parameter, set()).add(layer_of.get(part))
    return {parameter: numbers.pop() if len(numbers) == 1 else None for parameter, numbers in holders.items()}
