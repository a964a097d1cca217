"""A device without memory left ends a run with what was estimated, and with settings that would have fitted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from mimo.hooks import ConfigError, RunError
from mimo.launch import ProcessInfo
from mimo.launch.runtime import Fault
from mimo.trainer.config.toml import make_settings
from mimo.trainer.cost.memory import estimate_memory
from mimo.trainer.job.job import Job
from mimo.trainer.memory import out_of_memory
from mimo.trainer.memory.out_of_memory import fitting, memory_explained
from mimo.trainer.resolving.resolve import resolve

REASON = "CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation for Memory Management"
MIB = 2**20


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a machine that is busy try all settings too."""
    monkeypatch.setattr(out_of_memory, "_SECONDS", 1e9)


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Job]:
    """Make a job whose activations are most of what it holds, with overrides."""
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": "the rain in spain " * 20}) + "\n" * 2)
    settings: Mapping[str, Any] = {
        "run": {"name": "r", "steps": 1, "global_batch": 16, "micro_batch": 8, "directory": str(tmp_path / "run")},
        "data": {"plugin": "jsonl", "path": str(tmp_path / "train.jsonl"), "max_tokens": 400},
        "modules": {
            "language": {"plugin": "decoder", "ranks": "0-1", "config": {"hidden": 64, "layers": 4, "heads": 2}}
        },
    }
    return lambda *overrides: resolve(make_settings(settings, overrides))


@attrs.frozen
class Doing:
    """A part of a step."""

    def describe(self) -> str:
        """Name it."""
        return "forward of language stage 0, microbatch 1"

    def collective_ranks(self) -> tuple[int, ...]:
        """Nobody is met."""
        return ()


def raised(job: Job, *, device: str = "cpu", active: bool = True) -> RunError:
    """Return what becomes of a rank that has no memory left."""
    process = ProcessInfo(rank=1, world=2, local_rank=1, device=device)
    process.heartbeat.enter("step 5")
    process.heartbeat.begin(Doing() if active else None)
    with pytest.raises(RunError) as caught, memory_explained(job, process):
        raise torch.OutOfMemoryError(REASON)
    return caught.value


def test_the_error_says_where_and_how_much_and_what_would_fit(job: Callable[..., Job]) -> None:
    """The module, the step, the estimate by kind, what the device said, and the least changes; the cause stays."""
    made = job()
    estimate = estimate_memory(made)[1]
    error = raised(made)
    assert re.fullmatch(
        r"modules\.language: expected what rank 1 holds of language to fit cpu in step 5, forward of language stage 0, "
        r"microbatch 1; estimated are [\d.]+ MiB \(weights [\d.]+ MiB, gradients [\d.]+ MiB, optimizer [\d.]+ MiB, "
        r"activations [\d.]+ MiB\), got CUDA out of memory\. Tried to allocate 2\.00 GiB\. Estimated to fit: "
        r"modules\.language\.recompute=selective \([\d.]+ MiB\); or "
        r"modules\.language\.recompute=full \([\d.]+ MiB\); or "
        r"run\.micro_batch=4 \([\d.]+ MiB\)\.",
        str(error),
    )
    assert f"estimated are {estimate.device / MIB:,.1f} MiB (weights {estimate.weights / MIB:,.1f} MiB" in str(error)
    assert isinstance(error.__cause__, torch.OutOfMemoryError)
    assert Fault.of(error, 1).text == f"rank 1: {error}"
    assert "to fit cpu in step 5; estimated" in str(raised(made, active=False))


def test_what_is_said_to_fit_is_estimated_so(job: Callable[..., Job]) -> None:
    """Each change by itself is one that `mimo check` would say the same of, and none takes more than it may."""
    made = job()
    limit = round(0.6 * estimate_memory(made)[1].device)
    found = list(fitting(made, 1, limit))
    assert 2 < len(found) < 8
    for words, estimate in found:
        assert estimate == estimate_memory(job(*words.split()))[1]
        assert estimate.device <= limit
    wider = [words for words, _ in fitting(made, 1, 10 * limit)]
    assert wider[:2] == ["modules.language.recompute=selective", "modules.language.recompute=full"]
    assert wider[2:] == [
        *(f"run.micro_batch={size}" for size in (4, 2, 1)),
        *(f"modules.language.recompute=full run.micro_batch={size}" for size in (4, 2, 1)),
    ]


def test_what_is_recomputed_already_is_no_change(job: Callable[..., Job]) -> None:
    """Nor is what trains nothing, or what can't be resolved; with tokens, microbatches have fewer of them."""
    made = job("modules.language.recompute=full")
    assert [words for words, _ in fitting(made, 0, 2**60)] == [
        "run.micro_batch=4",
        "run.micro_batch=2",
        "run.micro_batch=1",
    ]
    tokens = job("run.global_batch=0", "run.micro_batch=1", "run.batch_tokens=6400", "run.micro_tokens=1600")
    words = [words for words, _ in fitting(tokens, 0, 2**60) if "recompute" not in words]
    assert words == ["run.micro_tokens=800", "run.micro_tokens=400"]  # less than a sample may have is refused


def test_where_nothing_fits_the_model_is_to_be_cut(job: Callable[..., Job]) -> None:
    """Over more ranks, or data lanes."""
    made = job("modules.language.recompute=full", "run.micro_batch=1")
    assert str(raised(made)).endswith(
        "No smaller microbatch and no recomputing is estimated to fit: cut the model over more ranks (tp, pp), or "
        'spread weights and optimizer over data lanes (optimizer.plugin=distributed, optimizer.shard="full").'
    )


def test_on_a_gpu_its_size_counts_and_its_allocator_is_written(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As JSON, in the run directory; a disk that is full hides nothing."""
    made = job()
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"device": 0, "total_size": 3}])
    smallest = min(estimate.device for _, estimate in fitting(made, 1, 2**60))
    size = SimpleNamespace(total_memory=smallest / 0.9 + 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: size)
    assert "Estimated to fit: modules.language.recompute=full run.micro_batch=1 (" in (
        text := str(raised(made, device="cuda:1"))
    )
    assert "allocator" not in text  # there is no folder yet
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "memory_rank1.json"
    assert str(raised(made, device="cuda:1")).endswith(f"What its allocator holds is in {path}.")
    assert json.loads(path.read_text()) == [{"device": 0, "total_size": 3}]


def test_other_errors_stay_as_they_are(job: Callable[..., Job]) -> None:
    """And so does a block without any."""
    process = ProcessInfo(rank=0, world=2, local_rank=0)
    with pytest.raises(ConfigError), memory_explained(job(), process):
        raise ConfigError("a", expected="b", got="c")
    with memory_explained(job(), process):
        pass


def test_trying_settings_ends_in_time(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait meanwhile."""
    monkeypatch.setattr(out_of_memory, "_SECONDS", -1)
    assert not list(fitting(job(), 1, 2**60))
