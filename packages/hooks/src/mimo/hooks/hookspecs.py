"""Lifecycle hooks: what a plugin hears of a run, and what it may add to a checkpoint (group ``mimo.lifecycle``)."""

from __future__ import annotations

from mimo.hooks._errors import UserError
from mimo.hooks._markers import hookspec
from mimo.hooks._values import EvaluationInfo, IndexInfo, RunInfo, Stateful, StepInfo


@hookspec
def mimo_run_begin(run: RunInfo) -> None:
    """Called on every rank once the model is built and loaded, before the first step."""


@hookspec
def mimo_step_begin(run: RunInfo, step: int) -> None:
    """Called on every rank before step ``step`` (counted from 1)."""


@hookspec
def mimo_step_end(run: RunInfo, info: StepInfo) -> None:
    """Called on every rank after the weights were stepped, or the step was skipped."""


@hookspec
def mimo_evaluated(run: RunInfo, info: EvaluationInfo) -> None:
    """Called on every rank after an evaluation."""


@hookspec
def mimo_save_failed(run: RunInfo, step: int, error: UserError) -> None:
    """Called on every rank when a checkpoint is missing and the run continues after ``step``.

    Its files could not be written; or it was left out (`SaveSkippedError`), since the one before was being written.
    Ranks may hear of it at different steps, so nothing collective may be called here.
    """


@hookspec
def mimo_run_end(run: RunInfo) -> None:
    """Called on every rank when the run has ended as planned.

    Each plugin is called by itself; an exception is reported, keeps no other plugin from its call, and changes no exit
    code.
    """


@hookspec
def mimo_fault(run: RunInfo, error: BaseException) -> None:
    """Called on the rank that failed, before the other ranks are ended.

    Each plugin is called by itself; an exception here is reported, and never hides ``error``.
    """


@hookspec
def mimo_indexed(index: IndexInfo) -> None:
    """Called by `mimo data index` for each index that it has written, outside of any run.

    Each plugin is called by itself; an exception is reported, and changes no exit code.
    """


@hookspec
def mimo_state(run: RunInfo) -> list[Stateful]:  # type: ignore[empty-body]
    """Return the parts that a checkpoint must hold beside model, optimizer and data position."""
