"""Going on from a checkpoint: which one is meant, with which step, and what is taken back from it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mimo.checkpoint import latest, load, read_manifest
from mimo.hooks import CheckpointError, ConfigError, Stateful
from mimo.optimizer.runtime import SCALING
from mimo.trainer._engine import Engine
from mimo.trainer._preflight import CHECKPOINTS
from mimo.trainer._resolved import Job
from mimo.trainer._run_state import other_state


def find_checkpoint(job: Job) -> Path | None:
    """Return the step folder that ``checkpoint.load`` names; None for none, and for a run that has saved none yet.

    Raises:
        CheckpointError: there is no complete checkpoint there.
    """
    where = job.settings.checkpoint.load
    if where == "none":
        return None
    if where != "latest":
        return step_folder(Path(where))
    folder = job.directory / CHECKPOINTS
    if latest(folder) is None and not list(folder.glob("step_*")):  # one that lacks its manifest is no beginning
        return None
    return step_folder(job.directory)


def first_step(job: Job, folder: Path) -> int:
    """Return the step with which a run goes on from a step folder.

    Raises:
        ConfigError: steps were of another size, so that samples would be skipped or read again.
    """
    manifest = read_manifest(folder)
    before = manifest.config["run"]["global_batch"]
    if before != job.settings.run.global_batch:
        raise ConfigError(
            "run.global_batch",
            expected=f"{before}, as in the run that {str(folder)!r} was saved by",
            got=repr(job.settings.run.global_batch),
            fix="The position in the data is counted in steps; micro_batch may change freely.",
        )
    return manifest.step + 1


def step_folder(path: Path) -> Path:
    """Return the newest step folder of a run directory or of its ``checkpoints``, or ``path`` if it is one itself.

    Raises:
        CheckpointError: there is no complete checkpoint there.
    """
    if (path / "manifest.json").is_file():
        return path
    found = latest(path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path)
    if found is None:
        raise CheckpointError(
            str(path),
            expected="a run directory, its checkpoints folder, or one step's folder",
            got="no complete checkpoint there",
        )
    return found


def resume(engine: Engine, parts: Iterable[Stateful], folder: Path) -> None:
    """Take back what `mimo.trainer._saving.save_step` saved, in this layout or another, this precision or another.

    A run in fp16 that goes on with one in another precision begins with the loss scale of a first step.
    """
    parts = list(parts)
    state = engine.state()
    if not any(name.startswith(f"optimizer.{SCALING}.") for name in read_manifest(folder).names):
        state["optimizer"] = {name: tree for name, tree in state["optimizer"].items() if name != SCALING}
    loaded = load(folder, {**state, **other_state(engine, parts, 0)})
    engine.optimizer.load(loaded["optimizer"])
    for part in parts:
        part.load(loaded[part.name])
