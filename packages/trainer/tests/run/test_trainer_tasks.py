"""How a job is handed to the launcher, and what ranks do in it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from eye import make_job, on, table

from mimo.checkpoint import save
from mimo.hooks import ConfigError
from mimo.launch import Gpus, ProcessInfo, take_lock
from mimo.trainer.decoding.answer_settings import AnswerSettings
from mimo.trainer.resume.resume_point import step_folder
from mimo.trainer.resume.run_state import RunState
from mimo.trainer.resume.save import save_step
from mimo.trainer.run import tasks as _tasks
from mimo.trainer.step.trainer import Trainer


def test_torch_is_asked_for_no_gpus_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a driver then holds could not be in the processes that are forked."""

    def refuse() -> Gpus:
        raise AssertionError("GPUs were looked for")

    def launch(_task: object, *, device: str, **_others: object) -> int:
        launched.append(device)
        return 0

    launched: list[str] = []
    monkeypatch.setattr(_tasks, "find_gpus", refuse)
    monkeypatch.setattr(_tasks, "launch", launch)
    job: Any = SimpleNamespace(world=2, settings=SimpleNamespace(run=SimpleNamespace(device="cpu", timeout=1.0)))
    assert _tasks.run_job(job, lambda _job, _process: None, purpose="evaluate") == 0
    assert launched == ["cpu"]
    job.settings.run.device = "auto"
    with pytest.raises(AssertionError, match="GPUs were looked for"):
        _tasks.run_job(job, lambda _job, _process: None, purpose="evaluate")


@pytest.mark.parametrize("code", [130, 143, 129])
def test_what_is_saved_is_said_when_a_run_is_interrupted(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A save that had only begun is none; a run that ends otherwise says so itself."""
    run = SimpleNamespace(device="cpu", timeout=1.0)
    job: Any = SimpleNamespace(world=1, settings=SimpleNamespace(run=run), directory=tmp_path)

    def end_with(code: int) -> str:
        monkeypatch.setattr(_tasks, "launch", lambda *_given, **_named: code)
        enter = partial(take_lock, tmp_path, seconds=0)
        assert _tasks.run_job(job, lambda _job, _process: None, purpose="train", enter=enter) == code
        return capsys.readouterr().err

    (tmp_path / "checkpoints" / ".step_00000040.partial-0123abcd").mkdir(parents=True)
    assert end_with(code) == f"mimo: no step is saved in {tmp_path}\n"
    save(tmp_path / "checkpoints", 20, {"a": torch.ones(1)}, config={}, topology={})
    assert end_with(code) == f"mimo: step 20 is saved in {tmp_path}; checkpoint.load=latest continues\n"
    assert [end_with(other) for other in (0, 3, 141)] == ["", "", ""]


def test_an_evaluation_without_held_out_samples_is_refused(tmp_path: Path, run_ranks: Callable[..., list[Any]]) -> None:
    """It names what jsonl data lack."""

    def evaluate(_rank: int) -> str:
        job = make_job(table({"language": on(0, 0)}, run={"directory": str(tmp_path)}))
        save_step(Trainer(job, rank=0, device=torch.device("cpu")), RunState(), [], 3)
        process, job = ProcessInfo(rank=0, world=1, local_rank=0), attrs.evolve(job, evaluation=None)
        with pytest.raises(ConfigError) as refused:
            _tasks.evaluate_checkpoint(
                step_folder(tmp_path), AnswerSettings(), attrs.evolve(job, evaluation=None), process
            )
        return str(refused.value)

    assert run_ranks(1, evaluate) == [
        "data: expected held-out samples, got none. For jsonl data, give data.evaluation_path=FILE."
    ]
