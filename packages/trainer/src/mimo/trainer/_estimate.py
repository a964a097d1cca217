"""How many bytes each rank will hold, from the shapes of its parameters alone; nothing is allocated."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from mimo.model import EncoderSpec, Stage
from mimo.model.runtime import Split, TensorAxis
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
            found[rank] += each * _count(module, Stage(place.pp, module.grid.pp), place.tp, job.hidden)
    return found


def _count(module: JobModule, stage: Stage, tensor_rank: int, hidden: int) -> int:
    """Return how many numbers one rank's parameters are."""
    axis = TensorAxis(rank=tensor_rank, size=module.grid.tp, sequence_parallel=module.sequence_parallel)
    with torch.device("meta"):
        built = _build(module, stage, hidden)
    splits = {} if module.spec.tensor is None else module.spec.tensor.plan(built, axis)
    return sum(splits.get(name, Split()).piece(parameter, axis).numel() for name, parameter in built.named_parameters())


def _build(module: JobModule, stage: Stage, hidden: int) -> nn.Module:
    if not isinstance(module.spec, EncoderSpec):
        return module.spec.build(module.config, stage)
    whole = module.spec.build(module.config, hidden)
    return whole if module.spec.stages is None else module.spec.stages.cut(whole, stage)
