"""What each rank of a run from Python does: the same as for a command, and one of them writes what the caller gets."""

from __future__ import annotations

import os
from pathlib import Path

import attrs

from mimo.checkpoint import read_manifest
from mimo.launch import ProcessInfo, is_joining, with_slurm
from mimo.trainer.api.outcome import write_value
from mimo.trainer.decoding.answer_settings import AnswerSettings
from mimo.trainer.job.job import Job
from mimo.trainer.run.inference import evaluate
from mimo.trainer.run.train import train_rank


def train_for(outcome: Path, job: Job, process: ProcessInfo) -> None:
    """Train, and write the last step and its loss."""
    last = train_rank(job, process)
    if _answers(process):
        write_value(outcome, None if last is None else {"step": last.step, "loss": last.loss})


def evaluate_for(outcome: Path, checkpoint: Path, answers: AnswerSettings, job: Job, process: ProcessInfo) -> None:
    """Evaluate a checkpoint, and write the result."""
    info = evaluate(job, process, checkpoint, read_manifest(checkpoint).step, answers)
    assert info is not None, "resolving refuses settings without held-out samples"
    if _answers(process):
        write_value(outcome, attrs.asdict(info, filter=lambda field, _value: field.name != "predictions"))


def _answers(process: ProcessInfo) -> bool:
    """Return whether this rank answers the caller: the first of those that it launched; under torchrun each its own."""
    return process.rank == 0 or is_joining(with_slurm(os.environ))
