"""``mimo evaluate``: evaluate a checkpoint on held-out samples."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path


def evaluate(checkpoint: Path, /, *overrides: str) -> int:
    """Evaluate a checkpoint on the held-out samples, in one process unless ranks are overridden.

    Args:
        checkpoint: its folder, or a run directory for the newest one.
        overrides: settings that differ from those that it was saved with, as key=value.
    """
    from mimo.launch import with_slurm
    from mimo.trainer.resolving.checkpoint_settings import settings_of
    from mimo.trainer.resolving.resolve import resolve
    from mimo.trainer.resume.directory import check_world
    from mimo.trainer.resume.resume_point import step_folder
    from mimo.trainer.run.tasks import evaluate_checkpoint, run_job

    folder = step_folder(checkpoint)
    job = resolve(settings_of(folder, overrides, "evaluate"), purpose="evaluate")
    check_world(job.world, with_slurm(os.environ))
    return run_job(job, partial(evaluate_checkpoint, folder), purpose="evaluate")
