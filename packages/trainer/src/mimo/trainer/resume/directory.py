"""What must be right around a run before it is launched: its directory, its world, and what logging needs."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from mimo.hooks import METRICS_FILE, ConfigError
from mimo.launch import unwritable
from mimo.trainer.config.names import CHECKPOINTS, CONFIG_FILE, PLAN_FILE, SIGNS_OF_A_RUN
from mimo.trainer.config.settings import Settings, steps_of
from mimo.trainer.config.toml import read_table

_BEGIN_AGAIN = "The run has saved no checkpoint of its own: remove the directory, and begin it again."


def check_directory(settings: Settings, *, joining: bool = False, restarted: bool = False) -> None:
    """Refuse a directory that holds another run, and a checkpoint that is not there.

    A run that ended before it had trained a step holds nothing that another one may not overwrite.

    ``latest`` goes on with a run that ended before its first checkpoint too, from its first step. Where there is no
    run at all, it is refused to whoever typed it, since a misspelled directory would begin one from nothing. A job of
    torchrun or Slurm may be restarted, and then says the same as the first time: for it, ``latest`` begins a run.

    Args:
        settings: the whole file.
        joining: whether torchrun or Slurm started this process.
        restarted: whether they did so before, for the same run: it goes on in its directory, and may need no more
            what it began with.

    Raises:
        ConfigError: naming ``run.directory``, ``checkpoint.load`` or ``load.finetune``.
    """
    directory, load, finetune = Path(settings.directory), settings.checkpoint.load, settings.load.finetune
    _check_place(directory)
    if finetune and not restarted and not _is_folder(finetune):
        raise ConfigError("load.finetune", expected="the folder of a checkpoint or of a run", got=repr(finetune))
    if load == "latest":
        if not holds_run(directory) and not joining:
            raise ConfigError(
                "checkpoint.load",
                expected=f"a run in {str(directory)!r} to go on with",
                got="none",
                fix="Check run.directory, or set checkpoint.load=none to begin a run.",
            )
        _check_beginning(settings)
        return
    if load != "none" and not restarted and not _is_folder(load):
        raise ConfigError("checkpoint.load", expected='"none", "latest" or the folder of a checkpoint', got=repr(load))
    resumes = load != "none" and Path(load).resolve().is_relative_to(directory.resolve())
    if holds_run(directory) and not left_nothing(directory) and not resumes and not restarted:
        raise ConfigError(
            "run.directory",
            expected="a directory without a run in it",
            got=f"{str(directory)!r}, which holds one",
            fix="Resume it with checkpoint.load=latest, name another directory, or remove it.",
        )


def check_writable(directory: Path) -> None:
    """Refuse a run directory that can't be made or written; nothing is left behind.

    Raises:
        ConfigError: naming ``run.directory``.
    """
    nearest, _ = _nearest(directory)
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise unwritable(directory, error) from error


def _nearest(directory: Path) -> tuple[Path, list[Path]]:
    """Return what is there of a path, and what of it is not, the innermost first."""
    missing: list[Path] = []
    while not os.path.lexists(directory) and directory != directory.parent:
        missing.append(directory)
        directory = directory.parent
    return directory, missing


def _check_place(directory: Path) -> None:
    """Refuse a run directory that is no folder, or can't be one where it is to be.

    Raises:
        ConfigError: naming ``run.directory``.
    """
    nearest, missing = _nearest(directory)
    try:
        if not nearest.is_dir():
            found = f"{str(directory)!r}, " + ("which" if nearest == directory else f"but {str(nearest)!r}")
            raise ConfigError("run.directory", expected="a folder", got=f"{found} is {_kind(nearest)}")
        for path in missing:  # what can't be looked for can't be made: too long a name, for one
            with contextlib.suppress(FileNotFoundError):
                os.lstat(nearest / path.name)
        with contextlib.suppress(FileNotFoundError):  # what can't be searched can't be used
            os.lstat(directory / CONFIG_FILE)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise unwritable(directory, error) from error


def _is_folder(path: str) -> bool:
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):  # a name that is too long, or none
        return False


def _kind(path: Path) -> str:
    mode = path.lstat().st_mode
    kinds = {stat.S_IFIFO: "a fifo", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
    return kinds.get(stat.S_IFMT(mode), "a link to nothing" if stat.S_ISLNK(mode) and not path.exists() else "a file")


def _check_beginning(settings: Settings) -> None:
    """Refuse to begin a run again, or to go on with it, as if it had begun with another checkpoint than it did.

    Raises:
        ConfigError: naming ``checkpoint.load`` or ``load.finetune``.
    """
    directory = Path(settings.directory)
    if not (directory / CONFIG_FILE).is_file():
        return
    before = read_table(directory / CONFIG_FILE)
    load, finetune = before.get("checkpoint", {}).get("load", "none"), before.get("load", {}).get("finetune", "")
    has_saved = has_steps(directory)
    if settings.load.finetune != finetune and (settings.load.finetune or not has_saved):
        raise ConfigError(
            "load.finetune",
            expected=f"{finetune!r}, with which the run in {str(directory)!r} began",
            got=repr(settings.load.finetune),
            fix="Leave it out to go on with the run." if has_saved else _BEGIN_AGAIN,
        )
    if load not in {"none", "latest"} and not has_saved:
        raise ConfigError(
            "checkpoint.load",
            expected=f"{load!r}, with which the run in {str(directory)!r} began",
            got="'latest'",
            fix=_BEGIN_AGAIN,
        )


def holds_run(directory: Path) -> bool:
    """Tell whether a run has begun in a directory; that one has taken it, and nothing more, makes none."""
    return any((directory / trace).exists() for trace in SIGNS_OF_A_RUN)


def left_nothing(directory: Path) -> bool:
    """Tell whether all that a run wrote into a directory is what it began with: no checkpoint, no metrics of a step.

    Runs write their plan before their settings: without it, ``config.toml`` may be somebody else's.
    """
    metrics = directory / METRICS_FILE
    is_of_run = (directory / PLAN_FILE).is_file()
    return is_of_run and not (directory / CHECKPOINTS).exists() and not (metrics.exists() and metrics.stat().st_size)


def has_steps(directory: Path) -> bool:
    """Tell whether a run has saved anything in its directory, be it whole or not.

    A step that makes place for another one of its number counts: it is whole, and the other may never have come.
    """
    folder = directory / CHECKPOINTS
    return any(any(folder.glob(pattern)) for pattern in ("step_*", ".step_*.replaced-*"))


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
    """Refuse TensorBoard logging where its plugin is missing, and a profile of steps that the run does not have.

    Raises:
        ConfigError: naming ``logging.tensorboard`` or ``logging.profile``.
    """
    profiled, steps = settings.logging.profile, settings.run.steps
    if profiled and steps_of(profiled)[0] > steps:
        raise ConfigError(
            "logging.profile",
            expected=f"steps that the run has, from 1 to {steps}",
            got=repr(profiled),
            fix="Name one of them, or set run.steps to more.",
        )
    needed = ("mimo_logger_tensorboard", "tensorboard")
    if settings.logging.tensorboard and any(importlib.util.find_spec(name) is None for name in needed):
        raise ConfigError(
            "logging.tensorboard",
            expected="the plugin mimo-logger-tensorboard to be installed",
            got="none",
            fix="From a clone of mimo: pip install plugins/logger-tensorboard packages/hooks; or set it to false.",
        )
