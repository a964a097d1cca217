"""Lifecycle plugin ``metrics``: a JSON object a line in ``metrics.jsonl`` for each step, evaluation and failed save."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from mimo.hooks import (
    METRICS_FILE,
    EvaluationInfo,
    RunInfo,
    SaveSkippedError,
    StepInfo,
    UserError,
    hookimpl,
    parse_metrics,
    plain_text,
)
from mimo.trainer.config.names import UNREADABLE_FILE


class Metrics:
    """Writes on rank 0, where all values are known as on every rank.

    A disk that is full must not end a run: lines that can't be written are lost, which is reported once.
    """

    def __init__(self) -> None:
        self._reported = False

    @hookimpl
    def mimo_run_begin(self, run: RunInfo) -> None:
        """Drop what an earlier attempt wrote of the steps that are now to come, and set aside what can't be read."""
        path = run.directory / METRICS_FILE
        if run.rank != 0 or not path.exists():
            return
        try:
            unreadable = _rewrite(path, before_step=run.first_step)
        except OSError as error:
            self._report_lost(path, f"drop the lines from step {run.first_step} on", error)
            return
        if unreadable:
            lines, are = ("line", "It is") if unreadable == 1 else ("lines", "They are")
            _report(
                f"{path}: expected a JSON object with a step in each line, got {unreadable} {lines} that can't be "
                f"read. {are} left out, and saved in {path.with_name(UNREADABLE_FILE)}."
            )

    @hookimpl
    def mimo_step_end(self, run: RunInfo, info: StepInfo) -> None:
        """Write a step; what it did not ask for or does not have is left out."""
        self._append(run, attrs.asdict(info, filter=lambda _attribute, value: value not in ({}, None)))

    @hookimpl
    def mimo_evaluated(self, run: RunInfo, info: EvaluationInfo) -> None:
        """Write an evaluation."""
        self._append(
            run,
            {
                "step": info.step,
                "evaluation": True,
                **attrs.asdict(info, filter=lambda attribute, value: attribute.name != "predictions" and value != {}),
            },
        )

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
            self._report_lost(path, f"write step {line['step']}", error)

    def _report_lost(self, path: Path, what: str, error: OSError) -> None:
        if not self._reported:
            self._reported = True
            _report(
                f"{path}: expected to {what}, got {error}. The run goes on; lines are lost until it can be written "
                "again."
            )


def _rewrite(path: Path, *, before_step: int) -> int:
    """Keep the lines before a step, save those that can't be read beside the file, and return how many these are."""
    unreadable, remaining = [], []
    for line in path.read_bytes().split(b"\n"):
        found = parse_metrics(line)
        if found is None:
            unreadable += [line] if line else []
        elif found["step"] < before_step:
            remaining.append(line)
    if unreadable:
        with path.with_name(UNREADABLE_FILE).open("ab") as file:
            file.write(_joined(unreadable))
    partial = path.with_name(f".{METRICS_FILE}.partial")  # so that what is kept outlives the end of this process
    partial.write_bytes(_joined(remaining))
    partial.replace(path)
    return len(unreadable)


def _joined(lines: Iterable[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def _report(text: str) -> None:
    with contextlib.suppress(OSError):  # it may be on the same full disk
        sys.stderr.write(plain_text(f"mimo: {text}\n"))
        sys.stderr.flush()


def _append(path: Path, line: bytes) -> None:
    """Append a line whole or not at all: half of one would break the next."""
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
