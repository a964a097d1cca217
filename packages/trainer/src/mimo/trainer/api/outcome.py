"""What a run that was started from Python comes to: a value, an error, or a fault, as JSON in a file."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mimo.hooks import (
    CheckpointError,
    ConfigError,
    DataError,
    PlanError,
    PluginError,
    RestartNeededError,
    ResultRejectedError,
    RunError,
    UserError,
)
from mimo.trainer.config.toml import write_atomically

if TYPE_CHECKING:
    from mimo.launch.runtime import Fault

_ERRORS: Mapping[str, type[UserError]] = {
    error.__name__: error
    for error in (
        *(CheckpointError, ConfigError, DataError, PlanError),
        *(PluginError, RestartNeededError, ResultRejectedError, RunError),
    )
}
_INTERRUPTED = (128 + signal.SIGINT, -signal.SIGINT)


class RunFailedError(RunError):
    """A run whose processes were started has failed.

    Args:
        what: names the run.
        code: with which its processes ended, as those of `mimo train` do.
        report: what the first rank to fail said, its traceback included, after what the others waited for; empty if it
            was shown elsewhere.
    """

    def __init__(self, what: str, *, code: int, report: str) -> None:
        got = report or f"exit code {code}; standard error has the reason"
        super().__init__(what, expected="to reach its end on every rank", got=got)
        self.code = code
        self.report = report


def write_value(file: Path, value: Any) -> None:
    """Write what a run returns; plain data."""
    _write(file, {"value": value})


def write_error(file: Path, error: UserError) -> None:
    """Write an error that ended a run before its processes were started."""
    kind = next(base.__name__ for base in (*type(error).__mro__, RunError) if base.__name__ in _ERRORS)
    parts = {"where": error.where, "expected": error.expected, "got": error.got, "fix": error.fix}
    _write(file, {"error": {"kind": kind, **parts}})


def write_fault(file: Path, fault: Fault) -> None:
    """Write what ended a run on one of its ranks."""
    _write(file, {"fault": fault.shown})


def read_outcome(file: Path, code: int, *, what: str) -> Any:
    """Return what a run returned.

    Args:
        file: that the run wrote, if it came so far.
        code: with which its launcher ended.
        what: names the run in errors.

    Raises:
        UserError: the run was refused, as a `ConfigError` for a setting that is wrong.
        RunFailedError: one of its ranks failed.
        KeyboardInterrupt: somebody interrupted it.
    """
    outcome = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if (error := outcome.get("error")) is not None:
        raise _ERRORS[error["kind"]](error["where"], expected=error["expected"], got=error["got"], fix=error["fix"])
    if code in _INTERRUPTED:
        raise KeyboardInterrupt
    if code or "value" not in outcome:  # what ends in silence, as a plugin that calls exit(0), has returned nothing
        raise RunFailedError(what, code=code, report=outcome.get("fault", ""))
    return outcome.get("value")


def _write(file: Path, outcome: Mapping[str, Any]) -> None:
    write_atomically(file, json.dumps(outcome))
