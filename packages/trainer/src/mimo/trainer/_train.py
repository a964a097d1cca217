"""The training loop of one rank: load, step, evaluate, save, and tell the lifecycle plugins."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tomli_w
import torch
import torch.distributed as dist

from mimo.checkpoint import latest, load, read_manifest, save
from mimo.hooks import CheckpointError, Common, ConfigError, PluginError, RunInfo, Stateful, StateTree, lifecycle
from mimo.optimizer.runtime import SCALING
from mimo.topology import AXES, Grid
from mimo.trainer._captions import save_captions
from mimo.trainer._engine import Engine
from mimo.trainer._place import Place
from mimo.trainer._preflight import CHECKPOINTS, CONFIG_FILE
from mimo.trainer._resolved import Job

PLAN_FILE = "plan.json"


def train(job: Job, place: Place) -> None:
    """Train on this rank, from the first step or from where a checkpoint left, to the last."""
    engine = Engine(job, rank=place.rank, device=torch.device(place.device))
    settings = job.settings
    found = find_checkpoint(job)
    first = 1 if found is None else first_step(job, found)
    run = RunInfo(
        name=settings.run.name,
        directory=job.directory,
        rank=place.rank,
        world=place.world,
        first_step=first,
        steps=settings.run.steps,
        config=job.plain,
    )
    plugins = lifecycle()
    parts = plugins.state(run)
    if found is not None:
        resume(engine, parts, found)
    if place.rank == 0:
        job.directory.mkdir(parents=True, exist_ok=True)
        (job.directory / CONFIG_FILE).write_text(tomli_w.dumps(job.plain), encoding="utf-8")
        (job.directory / PLAN_FILE).write_text(job.plan.to_json(), encoding="utf-8")
    dist.barrier()
    try:
        plugins.run_begin(run)
        for step in range(first, settings.run.steps + 1):
            plugins.step_begin(run, step)
            plugins.step_end(run, engine.train(step))
            last = step == settings.run.steps
            if last or _is_due(step, settings.run.evaluation_interval):
                evaluation = engine.evaluate(step)
                if evaluation is not None:
                    plugins.evaluated(run, evaluation)
            if last or _is_due(step, settings.checkpoint.interval):
                save_step(engine, parts, step)
        if engine.judges_first:
            save_captions(job, engine.written)
        plugins.run_end(run)
    except BaseException as error:
        plugins.fault(run, error)
        raise


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


def save_step(engine: Engine, parts: Iterable[Stateful], step: int) -> Path:
    """Save model, optimizer, progress and the plugins' state after ``step``."""
    job = engine.job
    tree = {**engine.state(), **_others(engine, parts, step)}
    return save(
        job.directory / CHECKPOINTS,
        step,
        tree,
        config=job.plain,
        topology={module.name: _grid(module.grid) for module in job.modules},
        keep=job.settings.checkpoint.keep or None,
    )


def resume(engine: Engine, parts: Iterable[Stateful], folder: Path) -> None:
    """Take back what `save_step` saved, in this layout or another, this precision or another.

    A run in fp16 that goes on with one in another precision begins with the loss scale of a first step.
    """
    parts = list(parts)
    state = engine.state()
    if not any(name.startswith(f"optimizer.{SCALING}.") for name in read_manifest(folder).names):
        state["optimizer"] = {name: tree for name, tree in state["optimizer"].items() if name != SCALING}
    loaded = load(folder, {**state, **_others(engine, parts, 0)})
    engine.optimizer.load(loaded["optimizer"])
    for part in parts:
        part.load(loaded[part.name])


def _others(engine: Engine, parts: Iterable[Stateful], step: int) -> dict[str, StateTree]:
    """Return what a checkpoint holds beside modules and optimizers, whose names nothing else may have."""
    taken = {"optimizer", "progress", *(module.name for module in engine.job.modules)}
    others: dict[str, StateTree] = {"progress": {"step": Common(step)}}
    for part in parts:
        if part.name in taken:
            raise PluginError(
                f"state {part.name!r}", expected="a name that no module and nothing of ours has", got=repr(part.name)
            )
        others[part.name] = part.state()
    return others


def _grid(grid: Grid) -> dict[str, Any]:
    return {"ranks": list(grid.ranks), **dict(zip(AXES, grid.shape, strict=True))}


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
