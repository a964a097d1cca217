"""What a rank reports of memory: what the device counts, every few steps, of the rank of a module that has most."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mimo.hooks import MemoryBytes
from mimo.schedule import Plan
from mimo.trainer.config.toml import make_settings
from mimo.trainer.memory import report
from mimo.trainer.memory.report import MemoryReport
from mimo.trainer.resolving.resolve import resolve

NO_PLAN = Plan(schedule="1f1b", microbatches=1, actors=())


class Counter:
    """An allocator that has given away 7 bytes and taken 9."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.resets = 0
        monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda _device: 7)
        monkeypatch.setattr(torch.accelerator, "max_memory_reserved", lambda _device: 9)
        monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", self.reset)

    def reset(self, _device: torch.device) -> None:
        """Begin anew."""
        self.resets += 1


def reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, others: Sequence[Any]) -> MemoryReport:
    """Return the report of one of several ranks; the others say what is given."""
    (tmp_path / "train.jsonl").write_text('{"text": "hello"}\n' * 4)
    settings: dict[str, Any] = {
        "run": {"name": "r", "steps": 9, "global_batch": 4},
        "data": {"plugin": "jsonl", "path": str(tmp_path / "train.jsonl")},
        "modules": {
            "language": {"plugin": "decoder", "ranks": "0-1", "config": {"hidden": 8, "layers": 1, "heads": 2}}
        },
        "logging": {"interval": 4},
    }
    monkeypatch.setattr(report, "all_gather_json", lambda own, _group: [own, *others])
    return MemoryReport(resolve(make_settings(settings)), rank=0, device=torch.device(device), labels=list)


def test_what_an_accelerator_counts_is_reported_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every ``logging.interval`` steps and in the last, of the rank that has most; the count then begins anew."""
    counter = Counter(monkeypatch)
    found = reported(tmp_path, monkeypatch, "cuda", [{"language": {"rank_held": None, "allocated": 5}}, {}])
    with found.measured(None):
        assert [step for step in range(1, 10) if found.of(step, NO_PLAN, "both")] == [4, 8, 9]
    assert found.of(4, NO_PLAN, "both") == {"language": MemoryBytes(allocated=7, reserved=9)}
    assert counter.resets == 4
    more = {"rank_held": None, "allocated": 8, "reserved": 8}
    found = reported(tmp_path, monkeypatch, "cuda", [{"language": more}])
    assert found.of(4, NO_PLAN, "both") == {"language": MemoryBytes(allocated=8, reserved=8)}


@pytest.mark.parametrize("step", [4, 9])
def test_a_processor_counts_nothing(step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And sends nothing."""
    found = reported(tmp_path, monkeypatch, "cpu", ())
    monkeypatch.setattr(report, "all_gather_json", None)
    assert found.of(step, NO_PLAN, "both") == {}
