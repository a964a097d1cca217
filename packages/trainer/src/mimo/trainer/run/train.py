"""The training loop of one rank: load, step, evaluate, save, and call the lifecycle plugins."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterable, Iterator
from functools import partial

import attrs
import torch
import torch.distributed as dist

from mimo.hooks import EvaluationInfo, RunError, RunInfo, Stateful, StepInfo, lifecycle
from mimo.launch import ProcessInfo
from mimo.schedule import plans_to_json
from mimo.trainer.config.names import CONFIG_FILE, PLAN_FILE
from mimo.trainer.config.toml import write_config
from mimo.trainer.job.job import Job
from mimo.trainer.job.precision import unrepeatable_refused
from mimo.trainer.memory.out_of_memory import memory_explained
from mimo.trainer.report.predictions import Predictions
from mimo.trainer.rerun.driver import RerunDriver
from mimo.trainer.rerun.machine import RerunStateMachine
from mimo.trainer.resume.attempt import last_attempt, note_begin
from mimo.trainer.resume.compatibility import check_source, with_balance
from mimo.trainer.resume.load import Resumed, begin, resume
from mimo.trainer.resume.resume_point import Source, find_source, share_source
from mimo.trainer.resume.save import Saving
from mimo.trainer.run.end import end_run, report_failures
from mimo.trainer.step.evaluator import Evaluation
from mimo.trainer.step.trainer import StepOutcome, Trainer


def train_rank(job: Job, process: ProcessInfo) -> StepInfo | None:
    """Train on this rank, from the first step or from where a checkpoint left, to the last, and return what that gave.

    It returns None where no step was left.

    Raises:
        RunError: the device has no memory left.
    """
    with memory_explained(job, process):
        return _train(job, process)


def _train(job: Job, process: ProcessInfo) -> StepInfo | None:
    progress = process.heartbeat
    progress.enter("finding what to begin with")
    job, source = _find(job, process)
    progress.enter("building the model")
    machine = RerunStateMachine(job, process)
    trainer = Trainer(
        job,
        rank=process.rank,
        device=torch.device(process.device),
        progress=progress,
        probe=machine.recorder,
        objects=process.objects,
    )
    progress.enter("loading")
    settings = job.settings
    run = RunInfo(
        name=settings.run.name,
        directory=job.directory,
        rank=process.rank,
        world=process.world,
        first_step=1 if source is None else source.first_step,
        steps=settings.run.steps,
        config=job.plain,
    )
    plugins = lifecycle([machine])
    parts = plugins.state(run)
    if source is None:
        state = begin(trainer)
    else:
        resumed = _load(trainer, machine, parts, source)
        run, state = attrs.evolve(run, loaded=resumed.summary), resumed.state
    del source  # its manifest may be large
    if process.rank == 0:
        _note_begin(job)
    dist.barrier(group=process.objects)
    saving = Saving(trainer, state, parts, partial(plugins.save_failed, run))
    machine.save = partial(saving.save, now=True, resumes_exactly=True)
    driver = RerunDriver(machine, trainer)
    outcome: StepOutcome | None = None
    with contextlib.closing(trainer), unrepeatable_refused(settings.run), _garbage_frozen():
        try:
            plugins.run_begin(run)
            for step in range(run.first_step, settings.run.steps + 1):
                progress.enter(f"step {step}")
                plugins.step_begin(run, step)
                outcome = driver.train(step)
                plugins.step_end(run, outcome.info)
                saving.report(step)
                last, stops = step == settings.run.steps, outcome.stops
                if last or (_is_due(step, settings.run.evaluation_interval) and not stops):
                    progress.enter(f"evaluation after step {step}")
                    evaluation = trainer.evaluate_with_predictions(step)
                    if evaluation is not None:
                        plugins.evaluated(run, _with_predictions(job, evaluation))
                if last or stops or _is_due(step, settings.checkpoint.interval):
                    progress.enter(f"saving step {step}")
                    saving.save(step, now=last or stops)
                if stops:
                    break
            progress.enter("the end of the run")
            saving.close()
            end_run(plugins, run, group=process.objects)
        except BaseException as error:
            report_failures(plugins.fault(run, error))
            raise
    return None if outcome is None else outcome.info


@contextlib.contextmanager
def _garbage_frozen() -> Iterator[None]:
    """Leave what is there already out of the search for garbage within, which takes long while other ranks wait.

    What of it becomes garbage stays until the end, or for as long as what somebody else has frozen.
    """
    is_first = not gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if is_first:
            gc.unfreeze()


def _find(job: Job, process: ProcessInfo) -> tuple[Job, Source | None]:
    """Return what a run begins with, as rank 0 sees it, and the job that resumes it."""
    last = last_attempt(job.directory, os.environ)
    source = share_source(find_source(job.settings, last=last) if process.rank == 0 else None, process.objects)
    return with_balance(job, source), source


def _load(trainer: Trainer, machine: RerunStateMachine, parts: Iterable[Stateful], source: Source) -> Resumed:
    """Load what a run begins with."""
    check_source(trainer.job, source)
    if not source.finetunes:
        machine.expect(source.manifest, source.folder)
    return resume(trainer, parts, source)


def _note_begin(job: Job) -> None:
    """Write what the run is, on one rank.

    Raises:
        RunError: it can't be written.
    """
    try:
        job.directory.mkdir(parents=True, exist_ok=True)
        note_begin(job.directory, os.environ)
        (job.directory / PLAN_FILE).write_text(plans_to_json(job.plans), encoding="utf-8")
        write_config(job.plain, job.directory / CONFIG_FILE)  # last: with a plan beside it, it is known for a run's
    except OSError as error:
        raise RunError(
            str(job.directory), expected="settings and plan of the run to be written", got=str(error), fix="Make room."
        ) from error


def _with_predictions(job: Job, evaluation: Evaluation) -> EvaluationInfo:
    """Return what plugins are handed of an evaluation: with predictions, on the rank that has the first samples."""
    if not evaluation.has_first:
        return evaluation.info
    return attrs.evolve(evaluation.info, predictions=Predictions(job, evaluation.predictions))


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
