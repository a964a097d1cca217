"""How a job is handed to the launcher."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mimo.launch import Gpus
from mimo.trainer.run import tasks as _tasks


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
