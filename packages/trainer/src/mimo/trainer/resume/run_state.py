"""What a checkpoint of a run holds beside modules and optimizers, under names that nothing else may have."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from mimo.hooks import Common, Owned, PluginError, Stateful, StateTree
from mimo.trainer.config.names import BASE, BUFFERS, IMPORTED, OPTIMIZER, PROGRESS, SETTINGS
from mimo.trainer.resume.chain import ChainLink
from mimo.trainer.resume.compatibility import optimizer_settings
from mimo.trainer.resume.data_order import order_state
from mimo.trainer.step.trainer import Trainer


@attrs.frozen(kw_only=True)
class RunState:
    """What a run reads from the checkpoint that it began with, and saves again in its own checkpoints.

    Args:
        data_begun: steps of the run before its data began.
        schedule_begun: steps of the run before the learning rates' schedules began.
        imported: for each module that began with a published folder, what was recorded of the import.
        left_out: the checkpoint with the weights that the run's own checkpoints leave out; None where they hold all.
    """

    data_begun: int = 0
    schedule_begun: int = 0
    imported: Mapping[str, Any] = attrs.field(factory=dict)
    left_out: ChainLink | None = None


def other_state(trainer: Trainer, state: RunState, parts: Iterable[Stateful], step: int) -> dict[str, StateTree]:
    """Return what a checkpoint holds beside modules and optimizers.

    The place in the data and in the learning rates' schedules follows from the step, the seed, the order of
    samples, and where both began.
    The ranks of each module save the settings of its optimizer, so that a resumed run can say what has changed.

    Raises:
        PluginError: a part has a name that is taken, or that holds a dot.
    """
    job = trainer.job
    assert job.train is not None
    taken = {OPTIMIZER, BASE, IMPORTED, PROGRESS, SETTINGS, BUFFERS, *(module.name for module in job.modules)}
    progress = {
        "step": step,
        "seed": job.settings.run.seed,
        "global_batch": job.settings.run.global_batch,
        "samples": len(job.train),
        "data_begun": state.data_begun,
        "schedule_begun": state.schedule_begun,
        "order": order_state(trainer.samples.order, trainer.samples.position(step + 1)),
        **({"broken": sorted(trainer.broken)} if trainer.broken else {}),
    }
    others: dict[str, StateTree] = {
        PROGRESS: {key: Common(value) for key, value in progress.items()},
        SETTINGS: {name: Owned(optimizer_settings(job.module(name)), name) for name in trainer.optimizer.modules},
        IMPORTED: {name: Common(about) for name, about in state.imported.items()},
    }
    others[BUFFERS] = {
        module: {path: Owned(_digest(buffer), module) for path, buffer in buffers.items()}
        for module, buffers in trainer.parts.buffers().items()
    }
    for part in parts:
        if part.name in taken or "." in part.name:
            raise PluginError(
                f"state {part.name!r}",
                expected="a name without dots that no module and nothing of ours has",
                got=repr(part.name),
            )
        others[part.name] = part.state()
    return others


def _digest(buffer: Tensor) -> str:
    held = buffer.detach().cpu().contiguous()
    return hashlib.blake2b(held.flatten().view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
