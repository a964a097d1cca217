"""Checks whether a run may start: before `mimo train` launches anything, and the same in `mimo check`.

What another run could change meanwhile is checked again once the directory is locked.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from mimo.hooks import ConfigError, lifecycle
from mimo.launch import LOCK_FILE, RunLock, check_unlocked, is_joining, take_lock
from mimo.trainer.config.names import CHECKPOINTS, CONFIG_FILE
from mimo.trainer.config.settings import Settings
from mimo.trainer.job.job import Job
from mimo.trainer.resolving.resolve import resolve
from mimo.trainer.resolving.teachers import check_targets
from mimo.trainer.resume.attempt import Attempt, forget_others, is_first, last_attempt
from mimo.trainer.resume.directory import check_directory, check_logging, check_world

_GRACE_SECONDS = 2.0
"""In which a run whose launcher was killed lets go of its directory, or `mimo check` has looked at it."""
_RESTART_SECONDS = 60.0
"""Longest that a restarted job waits for its predecessor; the other ranks wait two minutes for rank 0."""

LEFT_TO_THE_MACHINE = (
    "run.directory, checkpoint.load and load.finetune, GPUs, the processes that torchrun or Slurm starts, lifecycle "
    "plugins, and logging.tensorboard"
)
"""What `resolve_run` leaves out for a run elsewhere."""


def resolve_run(settings: Settings, environ: Mapping[str, str], *, elsewhere: bool = False) -> Job:
    """Return the job that settings describe, if it can begin here and now; nothing is made or written.

    Args:
        settings: the whole file.
        environ: of this process, with torchrun's names.
        elsewhere: whether it is to run on another machine: what only that one can answer is left out, and data that
            are not here are too.

    Raises:
        ConfigError: a setting is wrong, by itself, beside another one or on this machine.
        PluginError: a plugin can't be imported, or breaks its contract.
        PlanError: the schedule made a plan that could deadlock.
        CheckpointError: what it is to begin with can't be read.
        RestartNeededError: or ResultRejectedError: its last attempt ended so, and this one could only do the same.
    """
    if elsewhere:
        return resolve(settings, needs_data=False)
    check_logging(settings)
    lifecycle()
    try:
        last = _check_state(settings, environ)
    except ConfigError:
        if not is_joining(environ):  # a job that is restarted waits for its predecessor
            check_unlocked(Path(settings.directory))  # the run that lives there is the reason, and not to be removed
        raise
    job = resolve(settings)
    check_targets(job)
    check_world(job.world, environ)

    from mimo.launch import choose_device, find_gpus
    from mimo.trainer.resume.compatibility import check_source, with_balance
    from mimo.trainer.resume.resume_point import find_source

    if settings.run.device != "cpu":
        choose_device(settings.run.device, job.world, gpus=find_gpus(), environ=environ)
    source = find_source(settings, last=last)
    check_source(job, source)
    return with_balance(job, source)


def enter_directory(settings: Settings, environ: Mapping[str, str]) -> RunLock:
    """Hold the run directory, before anything else is written there; on one process of the run.

    Raises:
        ConfigError: another run holds it, or has begun in it since `resolve_run`; or it can't be written.
        RestartNeededError: or ResultRejectedError: the last attempt, which was waited for, ended so.
    """
    directory = Path(settings.directory)
    lock = take_lock(directory, seconds=_GRACE_SECONDS if is_first(environ) else _RESTART_SECONDS)
    try:
        _check_state(settings, environ)
        forget_others(directory, environ)
    except BaseException:
        lock.release()
        raise
    return lock


@contextlib.contextmanager
def written_into(target: Path) -> Iterator[None]:
    """Hold the run directory to whose checkpoints a command adds something; elsewhere there is nothing to hold.

    Args:
        target: the checkpoints of a run, or a folder in them.

    Raises:
        ConfigError: a run holds it.
    """
    path = target.resolve()
    for folder in (path, *path.parents):
        if folder.name == CHECKPOINTS and _is_of_run(folder.parent):
            with take_lock(folder.parent, seconds=_GRACE_SECONDS):
                yield
            return
    yield


def _is_of_run(directory: Path) -> bool:
    """Tell whether a run has begun or begins in a directory; any may have a folder named as checkpoints are."""
    return any(os.path.lexists(directory / name) for name in (CONFIG_FILE, LOCK_FILE))


def _check_state(settings: Settings, environ: Mapping[str, str]) -> Attempt | None:
    """Look at what lies in the run directory, and return the attempt that this one follows."""
    last = last_attempt(Path(settings.directory), environ)
    if last is not None:
        last.check(environ)
    check_directory(settings, joining=is_joining(environ), restarted=last is not None)
    return last
