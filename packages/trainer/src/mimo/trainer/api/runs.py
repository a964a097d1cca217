"""Training and evaluation as functions of a program: the same as the commands, in fresh processes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import attrs

from mimo.hooks import EvaluationInfo
from mimo.trainer.api.fresh import run_fresh
from mimo.trainer.config.structure import unstructure
from mimo.trainer.job.job import Job


@attrs.frozen(kw_only=True)
class TrainResult:
    """What a run came to.

    Args:
        directory: the run directory, with its metrics and checkpoints.
        step: the last that was trained; less than ``run.steps`` if somebody asked the run to stop.
        loss: of that step, per label token; not a number if nothing was left to train.
    """

    directory: Path
    step: int
    loss: float


def train(job: Job) -> TrainResult:
    """Train a job to its last step, as `mimo train` does: checks, lock, launch, resume, metrics and checkpoints.

    Its processes are fresh ones, whatever this program has done, and what they print appears where this program prints.
    They find plugins among what is installed. Under torchrun or Slurm each rank's program calls this, and gets its own.

    Raises:
        ConfigError: the run can't begin here and now, as where another one holds its directory.
        UserError: another reason that `mimo train` would give.
        RunFailedError: a rank failed.
        KeyboardInterrupt: Ctrl-C; all processes of the run have ended.
    """
    found = run_fresh("train", {"settings": unstructure(job.settings)}, what=f"run {job.directory}")
    if found is None:
        return TrainResult(directory=job.directory, step=job.settings.run.steps, loss=math.nan)
    return TrainResult(directory=job.directory, step=found["step"], loss=found["loss"])


def evaluate(
    checkpoint: Path | str,
    overrides: Iterable[str] = (),
    *,
    answers: Iterable[str] = (),
    max_tokens: int = 64,
    batch: int = 8,
) -> EvaluationInfo:
    """Evaluate a checkpoint on the held-out samples, as `mimo evaluate` does, in fresh processes.

    Args:
        checkpoint: its folder, or a run directory for the newest one.
        overrides: settings that differ from those that it was saved with, as key=value; one process unless they name
            ranks.
        answers: metrics by which generated answers are scored, such as ``"exact"``; none are generated without.
        max_tokens: most tokens of an answer.
        batch: how many answers are generated at once.

    Raises:
        ConfigError: an override is wrong, a metric is not installed, or nothing is held out.
        CheckpointError: there is no such checkpoint, or it is damaged.
        RunFailedError: a rank failed.
        KeyboardInterrupt: Ctrl-C; all processes have ended.
    """
    scored = {"metrics": list(answers), "max_tokens": max_tokens, "batch": batch}
    arguments = {"checkpoint": str(checkpoint), "overrides": list(overrides), "answers": scored}
    return EvaluationInfo(**run_fresh("evaluate", arguments, what=f"evaluation of {checkpoint}"))
