"""Starting a whole run, or an evaluation, in all its processes: what commands and programs share."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mimo.launch import with_slurm
from mimo.trainer.config.settings import Settings
from mimo.trainer.run.begin import enter_directory, resolve_run

if TYPE_CHECKING:
    from collections.abc import Callable

    from mimo.launch import ProcessInfo
    from mimo.launch.runtime import OnFailure
    from mimo.trainer.decoding.answer_settings import AnswerSettings
    from mimo.trainer.job.job import Job
    from mimo.trainer.run.tasks import Entry


def start_training(settings: Settings, entry: Entry | None = None, *, on_failure: OnFailure | None = None) -> int:
    """Train as settings say, on local processes or as one rank of torchrun's or Slurm's, and return the exit code.

    What is wrong is refused before torch is imported.

    Args:
        settings: the whole file.
        entry: what each rank does; None for `mimo.trainer.run.train.train_rank`.
        on_failure: is handed what ended the run, beside the run directory.

    Raises:
        UserError: see `resolve_run` and `enter_directory`.
    """
    environ = with_slurm(os.environ)
    job = resolve_run(settings, environ)

    from mimo.trainer.cost.parameter_names import check_patterns_of
    from mimo.trainer.run.tasks import run_job
    from mimo.trainer.run.train import train_rank

    check_patterns_of(job, computes=False)
    enter = partial(enter_directory, settings, environ)
    return run_job(job, entry or train_rank, purpose="train", enter=enter, stops=True, on_failure=on_failure)


def start_evaluation(
    checkpoint: Path,
    overrides: Iterable[str],
    answers: AnswerSettings,
    entry: Callable[[Path, AnswerSettings, Job, ProcessInfo], object] | None = None,
    *,
    on_failure: OnFailure | None = None,
) -> int:
    """Evaluate a checkpoint in all processes of its layout, and return the exit code.

    Args:
        checkpoint: its folder, or a run directory for the newest one.
        overrides: settings that differ from those that it was saved with, as key=value.
        answers: how answers are generated and scored.
        entry: what each rank does with the folder; None for `mimo.trainer.run.tasks.evaluate_checkpoint`.
        on_failure: is handed what ended it.

    Raises:
        UserError: the checkpoint or a setting is wrong.
    """
    from mimo.trainer.resolving.checkpoint_settings import settings_of
    from mimo.trainer.resolving.resolve import resolve
    from mimo.trainer.resume.directory import check_world
    from mimo.trainer.resume.resume_point import step_folder
    from mimo.trainer.run.tasks import evaluate_checkpoint, run_job

    answers.specs()
    folder = step_folder(checkpoint)
    job = resolve(settings_of(folder, overrides, "evaluate"), purpose="evaluate")
    check_world(job.world, with_slurm(os.environ))
    task = partial(entry or evaluate_checkpoint, folder, answers)
    return run_job(job, task, purpose="evaluate", on_failure=on_failure)
