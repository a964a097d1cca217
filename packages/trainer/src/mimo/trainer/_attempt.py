"""How the last attempt of a run under torchrun ended, for the next one to read.

Every worker's exit code is 1 to torchrun, which restarts after all of them alike. What an attempt must know of the one
before stands in the run directory: that it was of the same job, and whether it is any use to go on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import attrs

ATTEMPT_FILE = "attempt.json"
FINAL_CODES = frozenset({16, 17})
"""Exit codes after which a restart on the same machines would only end the same way."""

_JOB, _COUNT = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"


@attrs.frozen(kw_only=True)
class Attempt:
    """An attempt of a job of torchrun.

    Args:
        job: torchrun's name for it.
        code: with which it ended; None if it runs, or was killed.
        text: why.
    """

    job: str
    code: int | None = None
    text: str = ""


def is_elastic(environ: Mapping[str, str]) -> bool:
    """Tell whether torchrun started this process."""
    return _JOB in environ


def forget_others(directory: Path, environ: Mapping[str, str]) -> None:
    """Forget the attempts of an earlier job, in the first of a new one; before the ranks meet."""
    if is_elastic(environ) and environ.get(_COUNT, "0") == "0":
        (directory / ATTEMPT_FILE).unlink(missing_ok=True)


def note_begin(directory: Path, environ: Mapping[str, str]) -> None:
    """Note that an attempt has begun, on one rank, when all have met."""
    if is_elastic(environ):
        _write(directory, Attempt(job=environ[_JOB]))


def note_end(directory: Path | None, code: int, text: str, environ: Mapping[str, str]) -> None:
    """Note how an attempt ended, on the one rank that was the first to fail."""
    if directory is not None and is_elastic(environ):
        _write(directory, Attempt(job=environ[_JOB], code=code, text=text))


def last_attempt(directory: Path, environ: Mapping[str, str]) -> Attempt | None:
    """Return the attempt of the same job that this one follows; None if there is none, or it came to nothing."""
    if not is_elastic(environ) or environ.get(_COUNT, "0") == "0":
        return None
    try:
        attempt = Attempt(**json.loads((directory / ATTEMPT_FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    return attempt if attempt.job == environ[_JOB] else None


def _write(directory: Path, attempt: Attempt) -> None:
    path = directory / ATTEMPT_FILE
    partial = path.with_name(f".{ATTEMPT_FILE}.{os.getpid()}")
    partial.write_text(json.dumps(attrs.asdict(attempt)), encoding="utf-8")
    partial.replace(path)
