"""How many bytes each rank will hold, from the shapes of its parameters alone; nothing is allocated."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from mimo.model import EncoderSpec, LanguageModelSpec, Stage
from mimo.model.runtime import ExpertAxis, Split, TensorAxis
from mimo.trainer._precision import NUMBER_BYTES
from mimo.trainer._resolved import Job, JobModule

_WEIGHT_BYTES = 4
_TRAINED_BYTES = 4 + 8
"""Of a trained number beside its weight: the gradient, and the two fp32 values that AdamW keeps."""


def estimate_bytes(job: Job) -> Mapping[int, int]:
    """Return for each rank that holds a module the bytes of its weights, gradients and optimizer.

    In reduced precision what layers compute with is a copy of the weights. Activations are not counted, nothing counts
    as split over data lanes, and a stage counts as trained as a whole.
    """
    return {rank: sum(_bytes(job, rank, name) for name in job.graph.role(rank).places) for rank in job.graph.ranks}


def _bytes(job: Job, rank: int, name: str) -> int:
    """Return the bytes of a module on a rank; what two of its stages here share counts once."""
    module = job.graph.by_name[name]
    precision = job.settings.run.precision
    held = _WEIGHT_BYTES + (0 if precision == "fp32" else NUMBER_BYTES[precision])
    found: dict[str, int] = {}
    for stage in module.stages_at(module.grid.coordinates(rank).pp):
        each = held + (_TRAINED_BYTES if module.trains[stage] else 0)
        counts = _counts(job.module(name), rank, Stage(stage, module.stages), job.hidden)
        found |= {path: each * count for path, count in counts.items()}
    return sum(found.values())


def _counts(module: JobModule, rank: int, stage: Stage, hidden: int) -> Mapping[str, int]:
    """Return how many numbers each parameter of a stage has on a rank."""
    grid = module.grid
    place = grid.coordinates(rank)
    axis = TensorAxis(rank=place.tp, size=grid.tp, sequence_parallel=module.sequence_parallel)
    experts = ExpertAxis.of(grid, rank)
    with torch.device("meta"):
        built = build_stage(module, stage, hidden)
    splits = {} if module.spec.tensor is None else dict(module.spec.tensor.plan(built, axis))
    if isinstance(module.spec, LanguageModelSpec) and module.spec.experts is not None:
        splits |= module.spec.experts.plan(built, experts)
    found = {}
    for name, parameter in built.named_parameters():
        split = splits.get(name, Split())
        found[name] = split.piece(parameter, experts if split.experts else axis).numel()
    return found


def build_stage(module: JobModule, stage: Stage, hidden: int) -> nn.Module:
    """Return one stage of a module at full shapes, on the device of the caller's context."""
    if not isinstance(module.spec, EncoderSpec):
        return module.spec.build(module.config, stage)
    whole = module.spec.build(module.config, hidden)
    return whole if module.spec.stages is None else module.spec.stages.cut(whole, stage)
