"""Bytes that optimizers hold, of those that say: what was promised and what they have, summed over all ranks."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch
import torch.distributed as dist

from mimo.hooks import OptimizerBytes
from mimo.optimizer.runtime import MimoOptimizer
from mimo.trainer.job.job import Job


def add_up_memory(job: Job, optimizer: MimoOptimizer, *, device: torch.device) -> Mapping[str, OptimizerBytes]:
    """Return what a module's optimizers hold on all its ranks together, by module; called on all ranks alike.

    It does not travel with the ranks' agreement on each step: a longer message would be summed in another order, and
    the norm in it be another one in its last bit.

    Args:
        job: the same on every rank.
        optimizer: this rank's, as it was made: what it holds then it keeps.
        device: where the process group works.
    """
    choices = {module.name: module.optimizer for module in job.modules}
    names = [
        name
        for name, choice in choices.items()
        if any(spec.memory for spec in (choice.spec, *(pattern.rule.spec for pattern in choice.patterns)))
    ]
    if not names:
        return {}
    found = torch.zeros(len(names), len(attrs.fields(OptimizerBytes)), dtype=torch.int64)
    for row, name in zip(found, names, strict=True):
        for stepper in optimizer.modules[name].steppers if name in optimizer.modules else ():
            if stepper.rule.spec.memory is not None:
                row.add_(torch.tensor(attrs.astuple(stepper.rule.spec.memory(stepper.optimizer))))
    found = found.to(device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(found)
    return {name: OptimizerBytes(*row) for name, row in zip(names, found.tolist(), strict=True)}
