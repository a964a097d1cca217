"""Saving from inside a run: the report of a checkpoint that is left out, and the heartbeat of saving and loading."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from jobs import CPU, make_job
from tables import table

from mimo.hooks import RunInfo, UserError, lifecycle
from mimo.launch import Heartbeat
from mimo.testing import Pool
from mimo.trainer import Trainer
from mimo.trainer.runtime import LoadSettings, RunState, Saving, Source, resume, step_folder

ALONE = {"vision": {"ranks": [0], "dp": 1}, "language": {"ranks": [0], "dp": 1}}


def make_trainer(directory: str, progress: Heartbeat | None = None, **checkpoint: Any) -> Trainer:
    """Make a small model on one rank, with settings of ``[checkpoint]``."""
    settings = table(ALONE)
    settings["run"]["directory"] = directory
    settings["checkpoint"] = checkpoint
    return Trainer(make_job(settings), rank=0, device=CPU, progress=progress)


def run_skip(_rank: int, directory: str) -> list[str]:
    """Save while a checkpoint is still being written, and return the messages."""
    messages: list[str] = []
    config = {"logging": {"console": False}}
    run = RunInfo(name="r", directory=Path(directory), rank=0, world=1, first_step=1, steps=3, config=config)

    plugins = lifecycle([])

    def report(step: int, error: UserError) -> None:
        messages.append(f"{step}: {error}")
        plugins.save_failed(run, step, error)

    reached, opened, real = threading.Event(), threading.Event(), os.fsync

    def sync(file: int) -> None:
        reached.set()
        assert opened.wait(60)
        real(file)

    saving = Saving(make_trainer(directory, asynchronous=True, when_busy="skip"), RunState(), [], report)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", sync)
        saving.save(1)
        assert reached.wait(60)
        saving.report(2)
        saving.save(2)
        opened.set()
        saving.save(3, now=True)
        saving.close()
    return messages


def test_a_checkpoint_that_is_left_out_is_reported(tmp_path: Path, pool: Pool) -> None:
    """Once, as what it is: not as a disk that failed."""
    ((messages,),) = pool.run(1, run_skip, str(tmp_path))
    assert messages == (
        "2: step 2: expected the checkpoint before it to be written, got one that is still being written, and "
        'checkpoint.when_busy = "skip". A longer checkpoint.interval leaves it the time.'
    )
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 2, "save_skipped": True}]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "latest",
        "step_00000001",
        "step_00000003",
    ]


def run_and_count(_rank: int, directory: str) -> list[int]:
    """Save and load, and return the number of heartbeats of each."""
    progress, found = Heartbeat(), []
    trainer = make_trainer(directory, progress)
    saving = Saving(trainer, RunState(), [], lambda *_: None)
    before = progress.changes
    saving.save(1, now=True)
    found.append(progress.changes - before)
    before = progress.changes
    resume(trainer, [], Source.of(step_folder(Path(directory)), LoadSettings()))
    found.append(progress.changes - before)
    saving.close()
    return found


def test_saving_and_loading_send_heartbeats(tmp_path: Path, pool: Pool) -> None:
    """A checkpoint that takes longer than `run.timeout` doesn't look like a rank that hangs."""
    ((saving, loading),) = pool.run(1, run_and_count, str(tmp_path))
    assert saving > 0
    assert loading > 0
