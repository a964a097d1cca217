"""Why a run failed, and the board in the shared store on which the first rank to fail writes it for the others.

A rank that waits for a living peer is never told that another one has died, so death is spread by us.
"""

from __future__ import annotations

import json
import signal
import threading
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Self

import attrs

from mimo.hooks import UserError
from mimo.trainer._preflight import ERROR_FILE

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

EXIT_FAILED = 3
EXIT_INTERRUPTED = 130
_FIRST = "fault.first"
_FAULT = "fault"
_PUBLISHED_WITHIN = timedelta(seconds=10)


@attrs.frozen(kw_only=True)
class Fault:
    """What ended a run.

    Args:
        rank: where.
        code: exit code that every process takes.
        text: what the user reads, rank included.
        explained: whether the text is an error of ours, which needs no other cause.
    """

    rank: int
    code: int
    text: str
    explained: bool

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Self:
        """Return the fault that an exception is; only errors that a user can act on are shown without a traceback."""
        if isinstance(error, UserError):
            return cls(rank=rank, code=error.exit_code, text=f"rank {rank}: {error}", explained=True)
        text = "".join(traceback.format_exception(error)).rstrip()
        summary = traceback.format_exception_only(error)[-1].strip()
        return cls(rank=rank, code=EXIT_FAILED, text=f"{text}\nrank {rank} failed: {summary}", explained=False)

    @classmethod
    def of_exit(cls, rank: int, exit_code: int) -> Self:
        """Return the fault that a process is which ended without saying why; negative codes are signals."""
        if exit_code < 0:
            name = signal.Signals(-exit_code).name
            text = f"rank {rank} was ended by signal {-exit_code} ({name})."
            if -exit_code == signal.SIGKILL:
                text += " Something killed it; if nobody did, the machine ran out of memory."
        else:
            text = f"rank {rank} ended with exit code {exit_code} and without a reason."
        return cls(rank=rank, code=EXIT_FAILED, text=text, explained=False)

    def write(self, directory: Path | None) -> None:
        """Write the text into the run directory, if this is a run; the first to fail may be the first to need it."""
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / ERROR_FILE).write_text(f"{self.text}\n", encoding="utf-8")


class FaultBoard:
    """The first fault of a run, told to all its processes.

    Args:
        store: a client that nothing else waits on.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def claim(self, rank: int) -> bool:
        """Tell whether this rank is the first to fail; it must then `publish` why."""
        found: bytes = self._store.compare_set(_FIRST, "", str(rank))
        return int(found) == rank

    def publish(self, fault: Fault) -> None:
        """Tell everybody; from now on every process ends."""
        self._store.set(_FAULT, json.dumps(attrs.asdict(fault)))

    def read(self) -> Fault | None:
        """Return the fault, if there is one."""
        return self.wait() if self._store.check([_FAULT]) else None

    def wait(self) -> Fault:
        """Return the fault that another rank is about to publish."""
        self._store.wait([_FAULT], _PUBLISHED_WITHIN)
        return Fault(**json.loads(self._store.get(_FAULT)))

    def finish(self, world: int | None = None) -> None:
        """Count this rank as done; with ``world`` wait for all, as whoever hosts the store must."""
        self._store.add("finished", 1)
        if world is not None:
            pause, waited = threading.Event(), 0.0
            while self._store.add("finished", 0) < world and waited < _PUBLISHED_WITHIN.total_seconds():
                pause.wait(0.05)
                waited += 0.05
