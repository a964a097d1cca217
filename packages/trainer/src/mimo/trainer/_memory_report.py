"""Bytes that optimizers hold, of those that say: what was promised and what they have, summed over all ranks."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch
from torch import Tensor

from mimo.hooks import OptimizerBytes
from mimo.optimizer.runtime import MimoOptimizer
from mimo.trainer._resolved import Job


class MemoryReport:
    """Puts what each rank's optimizers hold into the step's one message, and reads there what those of all ranks do.

    Args:
        job: the job.
        device: where the message is made up.
    """

    def __init__(self, job: Job, *, device: torch.device) -> None:
        self._device = device
        choices = {module.name: module.optimizer for module in job.modules}
        self._names = {
            name: f"bytes.{name}"
            for name, choice in choices.items()
            if any(spec.memory for spec in (choice.spec, *(pattern.rule.spec for pattern in choice.patterns)))
        }

    @property
    def told(self) -> Mapping[str, int]:
        """Names of the sums, and how many values each has; none where no optimizer says what it holds."""
        return dict.fromkeys(self._names.values(), len(attrs.fields(OptimizerBytes)))

    def tell(self, optimizer: MimoOptimizer) -> Mapping[str, Tensor]:
        """Return this rank's part of the sums."""
        found = {}
        for module, name in self._names.items():
            steppers = optimizer.modules[module].steppers if module in optimizer.modules else ()
            held = [
                attrs.astuple(stepper.rule.spec.memory(stepper.optimizer))
                for stepper in steppers
                if stepper.rule.spec.memory is not None
            ]
            if held:
                found[name] = torch.tensor(held, dtype=torch.float64, device=self._device).sum(dim=0)
        return found

    def read(self, told: Mapping[str, Tensor]) -> Mapping[str, OptimizerBytes]:
        """Return the sums of all ranks by module."""
        return {module: OptimizerBytes(*told[name].long().tolist()) for module, name in self._names.items()}
