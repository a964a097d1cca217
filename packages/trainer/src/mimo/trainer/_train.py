"""The training loop of one rank: load, step, evaluate, save, and tell the lifecycle plugins."""

from __future__ import annotations

import tomli_w
import torch
import torch.distributed as dist

from mimo.hooks import RunInfo, lifecycle
from mimo.trainer._captions import save_captions
from mimo.trainer._engine import Engine
from mimo.trainer._place import Place
from mimo.trainer._preflight import CONFIG_FILE
from mimo.trainer._resolved import Job
from mimo.trainer._resuming import find_checkpoint, first_step, resume
from mimo.trainer._saving import save_step

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


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
