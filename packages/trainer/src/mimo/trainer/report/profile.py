"""Lifecycle plugin ``profile``: what torch's profiler sees of the steps that ``logging.profile`` names."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mimo.hooks import RunError, RunInfo, StepInfo, hookimpl
from mimo.trainer.config.names import PROFILES
from mimo.trainer.config.settings import steps_of

if TYPE_CHECKING:
    from torch.profiler import profile


class StepProfile:
    """Writes one trace a rank: the actions of its plan, and operations, kernels and messages of its threads and GPU."""

    def __init__(self) -> None:
        self._running: profile | None = None
        self._first = 0

    @hookimpl
    def mimo_step_begin(self, run: RunInfo, step: int) -> None:
        """Begin with the first of the steps, or with the first that a resumed run has of them."""
        if self._running is not None or step not in _steps(run):
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it prints when it begins and ends
        import torch
        from torch.profiler import ProfilerActivity, profile

        gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._running, self._first = profile(activities=[ProfilerActivity.CPU, *gpu]), step
        self._running.start()

    @hookimpl
    def mimo_step_end(self, run: RunInfo, info: StepInfo) -> None:
        """Write the trace after the last of the steps; see `_write`."""
        if info.step == _steps(run).stop - 1:
            self._write(run)

    @hookimpl
    def mimo_run_end(self, run: RunInfo) -> None:
        """Write that of a run that ends before the last of the steps; see `_write`."""
        self._write(run)

    def _write(self, run: RunInfo) -> None:
        """Write the trace of what has been profiled, if anything has.

        Raises:
            RunError: it can't be written.
        """
        if self._running is None:
            return
        running, self._running = self._running, None
        running.stop()
        path = run.directory / PROFILES / f"steps_{self._first:08d}_rank{run.rank}.json.gz"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(path))
        except OSError as error:
            raise RunError(
                str(path), expected="the trace of a profile to be written", got=str(error), fix="Make room."
            ) from error


def _steps(run: RunInfo) -> range:
    named = run.config["logging"]["profile"]
    return steps_of(named) if named != "" else range(0)
