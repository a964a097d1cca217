"""``mimo train``: train on local processes, or as one rank of a job that something else launched."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def train(
    file: Path, /, *overrides: str, finetune: Annotated[Path | None, Parameter(show_default=False)] = None
) -> int:
    """Train as FILE says, on local processes, or as one rank where torchrun or Slurm started this process.

    Args:
        file: settings in TOML; `mimo init` writes one.
        overrides: settings that differ, as key=value: run.steps=50 modules.vision.ranks=0-3.
        finetune: a checkpoint or a run whose weights alone this new run begins with, as load.finetune.
    """
    from mimo.launch import with_slurm
    from mimo.trainer.config.toml import read_settings
    from mimo.trainer.run.begin import enter_directory, resolve_run

    given = () if finetune is None else (f"load.finetune={json.dumps(str(finetune))}",)
    settings, environ = read_settings(file, (*overrides, *given)), with_slurm(os.environ)
    job = resolve_run(settings, environ)

    from mimo.trainer.cost.parameter_names import check_patterns_of
    from mimo.trainer.run import train as _train
    from mimo.trainer.run.tasks import run_job

    check_patterns_of(job, computes=False)
    enter = partial(enter_directory, settings, environ)
    return run_job(job, _train.train, purpose="train", enter=enter, stops=True)
