"""The lifecycle plugin that writes TensorBoard's event files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import attrs
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mimo.hooks import EvaluationInfo, Flops, RunInfo, StepInfo, lifecycle
from mimo_logger_tensorboard import TensorBoard


def write(directory: Path, *, first_step: int = 1, rank: int = 0, wanted: bool = True) -> None:
    """Let the plugin see a run to step 3 whose loss is ten times the step, and its evaluation."""
    config = {"logging": {"tensorboard": wanted}}
    run = RunInfo(name="r", directory=directory, rank=rank, world=2, first_step=first_step, steps=3, config=config)
    caller = lifecycle([TensorBoard()], entry_points=())
    caller.run_begin(run)
    about: dict[str, Any] = dict.fromkeys(("grad_norm", "lr", "seconds", "tokens_per_second"), 0.5)
    about |= {"label_tokens": 4, "truncated": 0, "skipped": False, "module_seconds": {}, "norms": {"vision": 0.5}}
    work = Flops(model_operations=8.0, hardware_operations=9.0, model_flops=4.0, hardware_flops=4.5)
    about["flops"] = {"vision": attrs.evolve(work, mfu=0.25, hfu=0.5), "language": work}
    for step in range(first_step, 4):
        caller.step_end(run, StepInfo(step=step, loss=10.0 * step, rows={"vision": 16}, **about))
    caller.evaluated(run, EvaluationInfo(step=3, loss=0.25, exact_match=0.75, samples=40, losses={"tutor": 0.5}))
    caller.run_end(run)


def scalars(directory: Path, name: str) -> list[tuple[int, float]]:
    """Return what TensorBoard reads: steps and values."""
    found = EventAccumulator(str(directory / "tensorboard"))
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars(name)]


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    """Steps, values of each module and evaluations."""
    write(tmp_path)
    assert scalars(tmp_path, "training/loss") == [(1, 10.0), (2, 20.0), (3, 30.0)]
    assert scalars(tmp_path, "rows/vision") == [(step, 16.0) for step in (1, 2, 3)]
    assert scalars(tmp_path, "grad_norm/vision") == [(step, 0.5) for step in (1, 2, 3)]
    assert scalars(tmp_path, "model_flops/language") == [(step, 4.0) for step in (1, 2, 3)]
    assert scalars(tmp_path, "hfu/vision") == [(step, 0.5) for step in (1, 2, 3)]
    assert scalars(tmp_path, "evaluation/exact_match") == [(3, 0.75)]
    assert scalars(tmp_path, "evaluation/tutor") == [(3, 0.5)]


def test_a_resumed_run_hides_what_an_earlier_attempt_wrote_of_its_steps(tmp_path: Path) -> None:
    """Each step is shown once."""
    write(tmp_path)
    write(tmp_path, first_step=2)
    assert [step for step, _ in scalars(tmp_path, "training/loss")] == [1, 2, 3]


def test_tensorboard_files_are_written_only_where_they_are_asked_for(tmp_path: Path) -> None:
    """On rank 0 alone, and only if the settings say so."""
    write(tmp_path, wanted=False)
    write(tmp_path, rank=1)
    assert not (tmp_path / "tensorboard").exists()


def test_logger_tensorboard_readme_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes an evaluation."""
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(program, {})  # noqa: S102 -- our own page
    assert scalars(tmp_path / "mine", "evaluation/exact_match") == [(1, 0.75)]
