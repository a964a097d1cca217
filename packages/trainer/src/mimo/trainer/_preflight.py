"""What must be right around a run before it is launched: its directory, its world, and what logging needs."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from mimo.hooks import ConfigError
from mimo.trainer._settings import Settings

CONFIG_FILE = "config.toml"
METRICS_FILE = "metrics.jsonl"
ERROR_FILE = "error.txt"
CHECKPOINTS = "checkpoints"
TRACES_OF_A_RUN = (CONFIG_FILE, METRICS_FILE, CHECKPOINTS)


def check_directory(settings: Settings, *, joining: bool = False) -> None:
    """Refuse a directory that holds another run, and a checkpoint that is not there.

    ``latest`` goes on with a run that ended before its first checkpoint too, from its first step. Where there is no
    run at all, it is refused to whoever typed it, since a misspelled directory would begin one from nothing. A job of
    torchrun or Slurm may be restarted, and then says the same as the first time: for it, ``latest`` begins a run.

    Args:
        settings: the whole file.
        joining: whether torchrun or Slurm started this process.

    Raises:
        ConfigError: naming ``run.directory`` or ``checkpoint.load``.
    """
    directory, load = Path(settings.directory), settings.checkpoint.load
    if directory.exists() and not directory.is_dir():
        raise ConfigError("run.directory", expected="a folder", got=f"{str(directory)!r}, which is a file")
    holds_run = any((directory / trace).exists() for trace in TRACES_OF_A_RUN)
    if load == "latest":
        if not holds_run and not joining:
            raise ConfigError(
                "checkpoint.load",
                expected=f"a run in {str(directory)!r} to go on with",
                got="none",
                fix="Check run.directory, or set checkpoint.load=none to begin a run.",
            )
        return
    if load != "none" and not Path(load).is_dir():
        raise ConfigError("checkpoint.load", expected='"none", "latest" or the folder of a checkpoint', got=repr(load))
    resumes = load != "none" and Path(load).resolve().is_relative_to(directory.resolve())
    if holds_run and not resumes:
        raise ConfigError(
            "run.directory",
            expected="a directory without a run in it",
            got=f"{str(directory)!r}, which holds one",
            fix="Resume it with checkpoint.load=latest, name another directory, or remove it.",
        )


def check_world(world: int, environ: Mapping[str, str]) -> None:
    """Refuse a world other than the one that torchrun or Slurm started.

    Args:
        world: processes that the modules need.
        environ: of this process.

    Raises:
        ConfigError: naming ``run.world``.
    """
    started = environ.get("WORLD_SIZE")
    if started is not None and "RANK" in environ and started != str(world):
        raise ConfigError(
            "run.world",
            expected=f"{started}, the number of processes that were started",
            got=repr(world),
            fix=f"Start {world} processes, set run.world = {started}, or change the modules' ranks.",
        )


def check_logging(settings: Settings) -> None:
    """Refuse TensorBoard logging where its package is missing.

    Raises:
        ConfigError: naming ``logging.tensorboard``.
    """
    if settings.logging.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "logging.tensorboard",
            expected="the package tensorboard to be installed",
            got="none",
            fix="pip install 'mimo-trainer[tensorboard]', or set it to false.",
        )
