"""What the attempts of one job know of each other: how the last one ended, and what lay there before the first.

Every worker's exit code is 1 to torchrun, which restarts after each of them; Slurm starts a job again from its
queue. What an attempt must know of the one before stands in the run directory: that it was of the same job, whether it
is any use to go on, and which checkpoint was the newest before the job began, so that its own can be distinguished.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs

from mimo.hooks import RestartNeededError, ResultRejectedError, parse_json
from mimo.launch import is_joining, with_slurm
from mimo.trainer.config.names import ATTEMPT_FILE, CHECKPOINTS, COLLECTIVES, ERROR_FILE, collectives_file
from mimo.trainer.config.toml import write_atomically

if TYPE_CHECKING:
    from mimo.launch.runtime import Fault

_FINAL = MappingProxyType({error.exit_code: error for error in (RestartNeededError, ResultRejectedError)})
"""Exit codes after which a restart on the same machines would only end the same way."""

_TORCHRUN, _SLURM = "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"
_RESTARTS, _REQUEUES = "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"


@attrs.frozen(kw_only=True)
class Attempt:
    """An attempt of a job of torchrun or Slurm.

    Args:
        job: Slurm's name for it, which outlives torchrun's; torchrun's where there is no Slurm.
        requeues: how often Slurm had started it again.
        before: digest of the manifest of the newest checkpoint in the run directory when the job's first attempt
            began; empty if there was none.
        code: with which it ended; None if it runs, or was killed.
        text: why.
    """

    job: str
    requeues: str = "0"
    before: str = ""
    code: int | None = None
    text: str = ""

    def is_final(self, environ: Mapping[str, str]) -> bool:
        """Tell whether a restart would only end the same way: Slurm's may be on other machines, torchrun's is not."""
        return self.code in _FINAL and self.requeues == environ.get(_REQUEUES, "0")

    def check(self, environ: Mapping[str, str]) -> None:
        """Refuse to begin again where a restart would only end the same way.

        Raises:
            RestartNeededError: or ResultRejectedError, with which this attempt ended.
        """
        if self.code is not None and self.is_final(environ):
            raise _FINAL[self.code](
                "not begun again",
                expected="a last attempt that a restart can help",
                got=f"one that ended with {self.code}:\n{self.text.rstrip()}\n",
            )

    def has_saved(self, directory: Path) -> bool:
        """Tell whether the newest checkpoint in a run directory is one that this job has saved."""
        found = _newest(directory)
        return found not in {"", self.before}


def forget_others(directory: Path, environ: Mapping[str, str]) -> None:
    """Forget the attempts of an earlier job, in the first of a new one; on one rank, before the others meet it."""
    if _job(environ) is not None and is_first(environ):
        (directory / ATTEMPT_FILE).unlink(missing_ok=True)


def note_begin(directory: Path, environ: Mapping[str, str]) -> None:
    """Note that an attempt has begun, on one rank, when all have met and before anything is saved."""
    _note(directory, None, "", environ)


def note_failure(directory: Path, fault: Fault) -> None:
    """Write why a run ended into its directory, for people and for the next attempt; where it was first known."""
    with contextlib.suppress(OSError):  # one of the two may still be written
        directory.mkdir(parents=True, exist_ok=True)
        (directory / ERROR_FILE).write_text(f"{fault.shown}\n", encoding="utf-8")
    note_end(directory, fault.code, fault.text, os.environ)


def forget_failure(directory: Path) -> None:
    """Remove why the last attempt ended, once another one has begun."""
    with contextlib.suppress(OSError):
        for path in (directory / ERROR_FILE, *directory.glob(COLLECTIVES)):
            path.unlink(missing_ok=True)


def note_hang(directory: Path, rank: int) -> None:
    """Write what a rank did with others when the run stood still, where torch was asked to note it down."""
    from mimo.launch.runtime import recorded_collectives

    found = recorded_collectives()
    if found and json.loads(found).get("entries"):
        (directory / collectives_file(rank)).write_bytes(found)


def note_end(directory: Path, code: int, text: str, environ: Mapping[str, str]) -> None:
    """Note how an attempt ended, on the one rank that was the first to fail."""
    _note(directory, code, text, environ)


def last_attempt(directory: Path, environ: Mapping[str, str]) -> Attempt | None:
    """Return the attempt of the same job that this one follows, which makes this one a restart; None if there is none.

    An attempt that ended before it had noted that it began came to nothing, and is none.
    """
    job = _job(environ)
    return None if job is None or is_first(environ) else _read(directory, job)


def _job(environ: Mapping[str, str]) -> str | None:
    """Return what names the job that this process was started for; None if nobody else started it."""
    joins = _TORCHRUN in environ or is_joining(with_slurm(environ))
    return environ.get(_SLURM, environ.get(_TORCHRUN)) if joins else None


def is_first(environ: Mapping[str, str]) -> bool:
    """Tell whether torchrun and Slurm have not started this before."""
    return all(environ.get(name, "0") == "0" for name in (_RESTARTS, _REQUEUES))


def _note(directory: Path, code: int | None, text: str, environ: Mapping[str, str]) -> None:
    """Write about this attempt; what lay there before the job began is found out by the first that writes."""
    job = _job(environ)
    if job is None:
        return
    last = _read(directory, job)
    before = _newest(directory) if last is None else last.before
    now = Attempt(job=job, requeues=environ.get(_REQUEUES, "0"), before=before, code=code, text=text)
    write_atomically(directory / ATTEMPT_FILE, json.dumps(attrs.asdict(now)))


def _read(directory: Path, job: str) -> Attempt | None:
    try:
        attempt = Attempt(**parse_json((directory / ATTEMPT_FILE).read_bytes()))
    except (OSError, ValueError, TypeError):  # none, or one that can't be read: what it said is lost
        return None
    return attempt if attempt.job == job else None


def _newest(directory: Path) -> str:
    from mimo.checkpoint import latest

    found = latest(directory / CHECKPOINTS)
    # Of all its bytes: a step that is trained and saved again has the settings of the job that did it.
    return "" if found is None else hashlib.blake2b((found / "manifest.json").read_bytes(), digest_size=16).hexdigest()
