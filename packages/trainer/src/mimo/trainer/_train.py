"""The training loop of one rank: load, step, evaluate, save, and tell the lifecycle plugins."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tomli_w
import torch
import torch.distributed as dist

from mimo.checkpoint import latest, load, read_manifest, save
from mimo.hooks import CheckpointError, Common, RunInfo, Stateful, StateTree, lifecycle
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
    first = 1 if found is None else read_manifest(found).step + 1
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
    """Return the step folder that ``checkpoint.load`` names, None for none.

    Raises:
        CheckpointError: there is no complete checkpoint there.
    """
    where = job.settings.checkpoint.load
    if where == "none":
        return None
    return step_folder(job.directory if where == "latest" else Path(where))


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
    tree = {**engine.state(), **_others(parts, step)}
    return save(
        job.directory / CHECKPOINTS,
        step,
        tree,
        config=job.plain,
        topology={module.name: _grid(module.grid) for module in job.modules},
        keep=job.settings.checkpoint.keep or None,
    )


def resume(engine: Engine, parts: Iterable[Stateful], folder: Path) -> None:
    """Take back what `save_step` saved, in this layout or another."""
    parts = list(parts)
    loaded = load(folder, {**engine.state(), **_others(parts, 0)})
    engine.optimizer.load(loaded["optimizer"])
    for part in parts:
        part.load(loaded[part.name])


def _others(parts: Iterable[Stateful], step: int) -> dict[str, StateTree]:
    return {"progress": {"step": Common(step)}, **{part.name: part.state() for part in parts}}


def _grid(grid: Grid) -> dict[str, Any]:
    return {"ranks": list(grid.ranks), **dict(zip(AXES, grid.shape, strict=True))}


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
