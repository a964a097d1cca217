"""``mimo train``: train on local processes, or as one rank of a job that something else launched."""

from __future__ import annotations

import json
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
    from mimo.trainer.config.toml import read_settings
    from mimo.trainer.run.start import start_training

    given = () if finetune is None else (f"load.finetune={json.dumps(str(finetune))}",)
    return start_training(read_settings(file, (*overrides, *given)))
