"""``mimo profile``: measure what a job's computations and messages cost."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from mimo.hooks import ConfigError


def profile(file: Path, /, *overrides: str, out: Path = Path("costs.json")) -> int:
    """Measure what the computations and messages of FILE take on this machine, for schedule.profile.

    Args:
        file: settings in TOML.
        overrides: settings that differ, as key=value.
        out: file to write.
    """
    from mimo.launch import with_slurm
    from mimo.trainer.config.toml import read_settings
    from mimo.trainer.resolving.resolve import resolve
    from mimo.trainer.resume.directory import check_world

    settings = read_settings(file, (*overrides, 'schedule.profile=""'))
    _check_output(out, file)
    job = resolve(settings)
    check_world(job.world, with_slurm(os.environ))

    from mimo.trainer.run import profiling as _profiling
    from mimo.trainer.run.tasks import run_job

    code = run_job(job, partial(_profiling.profile_job, out), purpose="train")
    if not code:
        print(f"{out}: costs of {len(job.graph.stages)} stages; set schedule.profile to it")
    return code


def _check_output(out: Path, file: Path) -> None:
    """Refuse a file that could not be written, or would replace the settings, before anything is measured.

    Raises:
        ConfigError: why not.
    """
    folder = out.absolute().parent
    if not folder.is_dir():
        raise ConfigError("--out", expected="a file in a folder that exists", got=repr(str(out)), fix="Make it first.")
    if out.is_dir() or not os.access(out if out.exists() else folder, os.W_OK):
        raise ConfigError("--out", expected="a file that can be written", got=repr(str(out)))
    if out.exists() and out.samefile(file):
        raise ConfigError("--out", expected="another file than the settings", got=repr(str(out)))
