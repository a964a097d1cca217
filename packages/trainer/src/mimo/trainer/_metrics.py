"""Lifecycle plugin ``metrics``: a JSON object a line in ``metrics.jsonl`` for each step, evaluation and failed save."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from mimo.hooks import EvaluationInfo, RunInfo, SaveSkippedError, StepInfo, UserError, hookimpl
from mimo.trainer._preflight import METRICS_FILE


class Metrics:
    """Writes on rank 0, where all values are known as on every rank.

    A disk that is full must not end a run: lines that can't be written are lost, which is told once.
    """

    def __init__(self) -> None:
        self._told = False

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
        self._append(run, attrs.asdict(info, filter=lambda _attribute, value: value not in ({}, None)))

    @hookimpl
    def mimo_evaluated(self, run: RunInfo, info: EvaluationInfo) -> None:
        """Write an evaluation."""
        self._append(run, {"step": info.step, "evaluation": True, **attrs.asdict(info)})

    @hookimpl
    def mimo_save_failed(self, run: RunInfo, step: int, error: UserError) -> None:
        """Write that a checkpoint is missing, and why."""
        if isinstance(error, SaveSkippedError):
            self._append(run, {"step": step, "save_skipped": True})
        else:
            self._append(run, {"step": step, "save_failed": True, "reason": str(error)})

    def _append(self, run: RunInfo, line: Mapping[str, Any]) -> None:
        if run.rank != 0:
            return
        path = run.directory / METRICS_FILE
        try:
            _append(path, f"{json.dumps(_finite(line), allow_nan=False)}\n".encode())
        except OSError as error:
            if not self._told:
                self._told = True
                sys.stderr.write(
                    f"mimo: {path}: expected to write step {line['step']}, got {error}. The run goes on; lines are "
                    "lost until it can be written again.\n"
                )
                sys.stderr.flush()


def read_lines(path: Path) -> list[Mapping[str, Any]]:
    """Return the objects of a metrics file, null for numbers that are not finite.

    A last line that was cut off by the end of its process is left out.
    """
    *whole, _ = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in whole]


def _append(path: Path, line: bytes) -> None:
    """Append a line whole or not at all: half of one would spoil the next."""
    with path.open("ab", buffering=0) as file:
        before = os.fstat(file.fileno()).st_size
        written = 0
        try:
            while written < len(line):  # a disk with room for a part takes that part first
                written += file.write(line[written:])
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(before)
            raise


def _finite(value: Any) -> Any:
    """Return plain data with null for numbers that are not finite, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
