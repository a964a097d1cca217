"""A checkpoint's model in the calling process, for `generate`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mimo.launch import ProcessInfo
from mimo.launch.runtime import join_alone
from mimo.trainer.resolving.checkpoint_settings import settings_of
from mimo.trainer.resolving.resolve import resolve
from mimo.trainer.resume.resume_point import step_folder
from mimo.trainer.run.inference import load_model
from mimo.trainer.step.trainer import Trainer


def open_checkpoint(
    checkpoint: Path | str,
    overrides: Iterable[str] = (),
    *,
    rank: int = 0,
    tp: int = 1,
    pp: int = 1,
    device: str = "cpu",
) -> Trainer:
    """Return a checkpoint's model on this rank, its weights loaded, for `generate`.

    Args:
        checkpoint: its folder, or a run directory for the newest one.
        overrides: settings that differ from those that it was saved with, as key=value.
        rank: this process in the default process group, which has ``tp * pp`` ranks; a process alone makes none.
        tp: ranks over which each stage of the language model is split.
        pp: stages of the language model.
        device: where this rank computes.

    Raises:
        ConfigError: a setting is wrong, or the model can't be split so.
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    folder = step_folder(Path(checkpoint))
    if tp * pp == 1:
        join_alone(device)
    job = resolve(settings_of(folder, overrides, "generate", tp=tp, pp=pp), purpose="generate")
    return load_model(job, ProcessInfo(rank=rank, world=tp * pp, local_rank=rank, device=device), folder)
