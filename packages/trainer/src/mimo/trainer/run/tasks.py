"""The work of each rank for a command, and how a command starts it: by forking, or from plain data when spawned."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import attrs

from mimo.checkpoint import latest, read_manifest
from mimo.hooks import ConfigError, plain_text
from mimo.launch import Device, ProcessInfo, RunLock, choose_device, find_gpus, is_joining, with_slurm
from mimo.launch.runtime import Fault, OnFailure, Terms, launch, start_method
from mimo.trainer.config.names import CHECKPOINTS
from mimo.trainer.config.structure import unstructure
from mimo.trainer.config.toml import make_settings
from mimo.trainer.decoding.answer_settings import AnswerSettings
from mimo.trainer.job.job import Job
from mimo.trainer.report.console import show_evaluation
from mimo.trainer.resolving.resolve import Purpose, resolve
from mimo.trainer.resume.attempt import forget_failure, note_failure, note_hang
from mimo.trainer.run.inference import evaluate

Entry: TypeAlias = Callable[[Job, ProcessInfo], object]

_INTERRUPTED = frozenset(128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
"""Exit codes of a run that is ended at once, without a last save."""


def run_job(
    job: Job,
    entry: Entry,
    *,
    purpose: Purpose,
    enter: Callable[[], RunLock] | None = None,
    stops: bool = False,
    on_failure: OnFailure | None = None,
) -> int:
    """Run ``entry`` in every rank of a job, and return the exit code.

    Args:
        job: what is run.
        entry: a function, or a `functools.partial` of one, that a fresh interpreter can import.
        purpose: for which the job was resolved.
        enter: holds the run directory, where then the reason of a failure is written too; called once, by the
            launcher, or by rank 0 where something else has launched the ranks. None: nothing is written.
        stops: whether ``entry`` ends by itself after SIGTERM.
        on_failure: is handed what ended the job, after the run directory has it.
    """
    environ = with_slurm(os.environ)
    device: Device = "cpu"
    if job.settings.run.device != "cpu":  # else a driver that was asked for GPUs would be in every forked process
        device = choose_device(job.settings.run.device, job.world, gpus=find_gpus(), environ=environ)
    method = start_method(device)
    task = partial(entry, job)
    if method == "spawn" and not is_joining(environ):
        # A fresh interpreter gets plain data: jobs hold functions of plugins, which need not be picklable.
        task = partial(_resolve_again, unstructure(job.settings), purpose, entry)
    terms = Terms(timeout=job.settings.run.timeout, stops=stops, on_failure=on_failure)
    if enter is not None:
        terms = attrs.evolve(
            terms,
            on_failure=partial(_note_failure, job.directory, on_failure),
            on_hang=partial(note_hang, job.directory),
            on_start=partial(forget_failure, job.directory),
        )
    how = partial(launch, task, world=job.world, device=device, method=method)
    if enter is None or is_joining(environ):
        return how(terms=attrs.evolve(terms, enter=enter))
    with enter() as lock:
        code = how(terms=attrs.evolve(terms, lock=lock))
        if code in _INTERRUPTED:
            _report_saved(job.directory)
        return code


def evaluate_checkpoint(step_folder: Path, answers: AnswerSettings, job: Job, process: ProcessInfo) -> None:
    """Evaluate a checkpoint, generating answers if metrics of these are asked for, and print the result.

    Raises:
        ConfigError: there is nothing held out to evaluate on.
    """
    info = evaluate(job, process, step_folder, read_manifest(step_folder).step, answers)
    if info is None:
        raise ConfigError(
            "data", expected="held-out samples", got="none", fix="For jsonl data, give data.evaluation_path=FILE."
        )
    if process.rank == 0:
        print(show_evaluation(info))


def _note_failure(directory: Path, on_failure: OnFailure | None, fault: Fault) -> None:
    with contextlib.suppress(OSError):  # a full disk, which may be the fault itself
        note_failure(directory, fault)
    if on_failure is not None:
        on_failure(fault)


def _report_saved(directory: Path) -> None:
    """Say on standard error which step the next run can resume."""
    found = latest(directory / CHECKPOINTS)
    if found is None:
        text = f"no step is saved in {directory}"
    else:
        text = f"step {int(found.name.removeprefix('step_'))} is saved in {directory}; checkpoint.load=latest continues"
    with contextlib.suppress(OSError):  # a terminal that is gone
        sys.stderr.write(plain_text(f"mimo: {text}\n"))
        sys.stderr.flush()


def _resolve_again(table: Mapping[str, Any], purpose: Purpose, entry: Entry, process: ProcessInfo) -> object:
    return entry(resolve(make_settings(table), purpose=purpose), process)
