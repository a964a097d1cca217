"""How many bytes each rank will hold, from the shapes of its parameters alone; nothing is allocated."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from mimo.model import EncoderSpec, LanguageModelSpec, Stage
from mimo.model.runtime import ExpertAxis, Split, TensorAxis
from mimo.trainer._resolved import Job, JobModule

_WEIGHT_BYTES = 4
_TRAINED_BYTES = 4 + 8
"""Of a trained number beside its weight: the gradient, and the two fp32 values that AdamW keeps."""


def estimate_bytes(job: Job) -> Mapping[int, int]:
    """Return for each rank that holds a module the bytes of its weights, gradients and optimizer.

    Activations are not counted, and a stage counts as trained as a whole.
    """
    found = dict.fromkeys(job.graph.ranks, 0)
    for module in job.modules:
        trains = job.graph.by_name[module.name].trains
        for rank in module.grid.ranks:
            place = module.grid.coordinates(rank)
            each = _WEIGHT_BYTES + (_TRAINED_BYTES if trains[place.pp] else 0)
            found[rank] += each * _count(module, rank, job.hidden)
    return found


def _count(module: JobModule, rank: int, hidden: int) -> int:
    """Return how many numbers one rank's parameters are."""
    grid = module.grid
    place = grid.coordinates(rank)
    axis = TensorAxis(rank=place.tp, size=grid.tp, sequence_parallel=module.sequence_parallel)
    experts = ExpertAxis.of(grid, rank)
    with torch.device("meta"):
        built = _build(module, Stage(place.pp, grid.pp), hidden)
    splits = {} if module.spec.tensor is None else dict(module.spec.tensor.plan(built, axis))
    if isinstance(module.spec, LanguageModelSpec) and module.spec.experts is not None:
        splits |= module.spec.experts.plan(built, experts)
    numbers = 0
    for name, parameter in built.named_parameters():
        split = splits.get(name, Split())
        numbers += split.piece(parameter, experts if split.experts else axis).numel()
    return numbers


def _build(module: JobModule, stage: Stage, hidden: int) -> nn.Module:
    if not isinstance(module.spec, EncoderSpec):
        return module.spec.build(module.config, stage)
    whole = module.spec.build(module.config, hidden)
    return whole if module.spec.stages is None else module.spec.stages.cut(whole, stage)
