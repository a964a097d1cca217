"""Lifecycle plugin ``metrics``: a JSON object a line in ``metrics.jsonl`` for each step, evaluation and failed save."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from mimo.hooks import EvaluationInfo, RunInfo, StepInfo, UserError, hookimpl
from mimo.trainer._preflight import METRICS_FILE


class Metrics:
    """Writes on rank 0, where all values are known as on every rank."""

    @hookimpl
    def mimo_run_begin(self, run: RunInfo) -> None:
        """Drop what an earlier attempt wrote of the steps that are now to come."""
        path = run.directory / METRICS_FILE
        if run.rank != 0 or not path.exists():
            return
        kept = [line for line in read_lines(path) if line["step"] < run.first_step]
        partial = path.with_name(f".{METRICS_FILE}.partial")  # so that what is kept outlives the end of this process
        partial.write_text("".join(f"{json.dumps(line)}\n" for line in kept), encoding="utf-8")
        partial.replace(path)

    @hookimpl
    def mimo_step_end(self, run: RunInfo, info: StepInfo) -> None:
        """Write a step; what it did not ask for or does not have is left out."""
        _append(run, {key: value for key, value in attrs.asdict(info).items() if value not in ({}, None)})

    @hookimpl
    def mimo_evaluated(self, run: RunInfo, info: EvaluationInfo) -> None:
        """Write an evaluation."""
        _append(run, {"step": info.step, "evaluation": True, **attrs.asdict(info)})

    @hookimpl
    def mimo_save_failed(self, run: RunInfo, step: int, error: UserError) -> None:
        """Write that a checkpoint is missing, and why."""
        _append(run, {"step": step, "save_failed": True, "reason": str(error)})


def read_lines(path: Path) -> list[Mapping[str, Any]]:
    """Return the objects of a metrics file, null for numbers that are not finite.

    A last line that was cut off by the end of its process is left out.
    """
    *whole, _ = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in whole]


def _append(run: RunInfo, line: Mapping[str, Any]) -> None:
    if run.rank == 0:
        with (run.directory / METRICS_FILE).open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(_finite(line), allow_nan=False)}\n")


def _finite(value: Any) -> Any:
    """Return plain data with null for numbers that are not finite, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
