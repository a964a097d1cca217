"""How much arithmetic each module does in a step, how fast, and what share that is of what its ranks could do.

PaLM (arXiv:2204.02311), appendix B: model FLOPs utilisation counts what forward and backward need, hardware FLOPs
utilisation also what is computed again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mimo.hooks import Flops
from mimo.trainer.batch.step_data import StepData
from mimo.trainer.cost.operations import module_operations
from mimo.trainer.cost.peak import peak_of
from mimo.trainer.cost.sample_stats import SampleStats
from mimo.trainer.job.job import Job


class FlopsReport:
    """Tells the arithmetic of steps, from lengths, labels and sizes that every rank knows: nothing is sent for it.

    Args:
        job: the same on every rank.
        device: where this rank computes; all ranks are taken to have the like.
    """

    def __init__(self, job: Job, *, device: torch.device) -> None:
        self._job = job
        self._peak = peak_of(job.settings.run, device)
        self._modules = [module for module in job.modules if module.spec.flops is not None]

    def of(self, data: StepData, *, label_tokens: int, seconds: float) -> Mapping[str, Flops]:
        """Return by module what a step comes to; a module whose plugin does not tell is left out.

        Args:
            data: its samples.
            label_tokens: of them all, as the ranks have agreed on.
            seconds: that the step took.
        """
        layouts = [layout for microbatch in data.microbatches for layout in microbatch.layouts]
        samples = SampleStats.of_layouts(self._job, layouts, labels=label_tokens)
        return {
            module.name: self._flops(module.name, samples, seconds * len(module.grid.ranks)) for module in self._modules
        }

    def _flops(self, module: str, samples: SampleStats, seconds: float) -> Flops:
        """Return what a module comes to whose ranks have spent so many seconds, all of them together."""
        done = module_operations(self._job, module, samples)
        model = done.forward + done.backward
        hardware = model + done.repeated
        return Flops(
            model_operations=model,
            hardware_operations=hardware,
            model_flops=model / seconds,
            hardware_flops=hardware / seconds,
            mfu=model / seconds / self._peak if self._peak else None,
            hfu=hardware / seconds / self._peak if self._peak else None,
        )
