"""Why a run failed, and the fault store in which the first rank to fail publishes it for the others.

A rank that waits for a living peer does not notice that a third one has died, so each fault is published to all ranks.
"""

from __future__ import annotations

import contextlib
import errno
import json
import signal
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, Self, TypeAlias

import attrs

from mimo.hooks import UserError, plain_text
from mimo.launch.process.heartbeat import Status

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

EXIT_FAILED = 3
EXIT_INTERRUPTED = 130
_FIRST, _FAULT, _CHANGES, _QUERY, _FINISHED = "fault.first", "fault", "changes", "query", "finished"
_DIRECTORY = "directory"
_PUBLISHED_SECONDS = 20.0
_FINISHED_SECONDS = 10.0
_WRITE_SECONDS = 3.0
_LOOK_SECONDS = 0.05
_LOST = ("Connection closed by peer", "Connection reset by peer", "Connection refused", "gloo", "NCCL", "Broken pipe")
_NO_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "Cannot allocate memory", "std::bad_alloc")
_NO_THREAD = "can't start new thread"
_TRY_AGAIN = frozenset(f"{number}Resource temporarily unavailable" for number in ("", f"[Errno {errno.EAGAIN}] "))
"""The whole message where no thread or process can be started; that of a locked file is longer."""


@attrs.frozen(kw_only=True)
class Fault:
    """What ended a run.

    Args:
        rank: where.
        code: exit code that every process takes.
        text: what the user reads, rank included.
        explained: whether the text is an error of ours, which needs no other cause.
        waits: where the other ranks waited, a line each.
        hangs: whether ranks made no more progress, so that what each of them waits for says why.
    """

    rank: int
    code: int
    text: str
    explained: bool
    waits: str = ""
    hangs: bool = False

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Self:
        """Return the fault that an exception causes; errors that a user can act on have no traceback."""
        if isinstance(error, UserError):
            return cls(rank=rank, code=error.exit_code, text=f"rank {rank}: {error}", explained=True)
        text = "".join(traceback.format_exception(error)).rstrip()
        summary = traceback.format_exception_only(error)[-1].strip()
        said = f"rank {rank} {lack}: {summary}" if (lack := lack_of(error)) else f"rank {rank} failed: {summary}"
        return cls(rank=rank, code=EXIT_FAILED, text=f"{text}\n{said}", explained=bool(lack))

    @classmethod
    def of_exit(cls, rank: int, exit_code: int, why: str = "") -> Self:
        """Return the fault of a process that ended without a reason.

        Args:
            rank: of the process.
            exit_code: negative for signals.
            why: a sentence with what is known about its end.
        """
        if exit_code < 0:
            names = {one.value: f" ({one.name})" for one in signal.Signals}  # those for real time have none
            text = f"rank {rank} was ended by signal {-exit_code}{names.get(-exit_code, '')}."
            if -exit_code == signal.SIGKILL and not why:
                text += " Something killed it; if nobody did, the machine ran out of memory."
        else:
            text = f"rank {rank} ended with exit code {exit_code} and without a reason."
        return cls(rank=rank, code=EXIT_FAILED, text=f"{text} {why}".rstrip(), explained=False)

    @property
    def shown(self) -> str:
        """All of it, the cause last."""
        return plain_text(f"{self.waits}\n{self.text}" if self.waits else self.text)


def report_in_time(on_failure: OnFailure | None, fault: Fault) -> None:
    """Call ``on_failure`` and wait a few seconds at most: a disk that doesn't answer must not delay the end."""
    if on_failure is not None:
        call_in_time(partial(on_failure, fault))


def call_in_time(function: Callable[[], object]) -> None:
    """Call a function that writes files, and wait a few seconds at most."""

    def write() -> None:
        with contextlib.suppress(OSError):
            function()

    writer = threading.Thread(target=write, name="mimo-fault", daemon=True)
    try:
        writer.start()
    except RuntimeError:  # no thread can be started any more, which may be the fault itself
        write()
        return
    writer.join(_WRITE_SECONDS)


def lack_of(error: BaseException) -> str:
    """Return what this machine or a limit of it refused to a process, and name the limit; empty if nothing."""
    text, number = str(error), error.errno if isinstance(error, OSError) else None
    if isinstance(error, MemoryError) or number == errno.ENOMEM or any(one in text for one in _NO_MEMORY):
        return "is out of host memory"
    if _NO_THREAD in text or text in _TRY_AGAIN:
        return (
            "can't start another thread or process (see ulimit -u and -v, pids.max of its control group, host memory)"
        )
    if number == errno.EMFILE or "Too many open files" in text:
        return "can't open another file or connection (see ulimit -n)"
    return ""


def is_consequence(error: BaseException) -> bool:
    """Return whether an error may only mean that another process is gone, as a lost connection does."""
    from torch import distributed as dist

    if lack_of(error):
        return False
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, dist.DistError | ConnectionError):
            return True
        if type(seen) is RuntimeError and any(text in str(seen) for text in _LOST):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


OnFailure: TypeAlias = Callable[[Fault], None]
"""Called with the fault that ended a run by the process that finds it first, before others end because of it."""


class FaultStore:
    """The first fault of a run and the last status of each rank, in a store that all its processes share.

    Args:
        store: a client of its own, which no other thread uses.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def changes(self) -> int:
        """Return how often a fault was published or a status query begun: one small request, made again and again."""
        return int(self._store.add(_CHANGES, 0))

    def claim(self, rank: int) -> bool:
        """Return whether this rank is the first to fail; it must then `publish` why."""
        found: bytes = self._store.compare_set(_FIRST, "", str(rank))
        return int(found) == rank

    def first(self, rank: int, meanwhile: Callable[[], object] = lambda: None) -> Fault | None:
        """Claim to be the first rank to fail, or return the fault of the rank that was.

        Args:
            rank: this one, which must `publish` why if nothing is returned.
            meanwhile: called again and again while that rank is waited for, which loses its claim if it never does.
        """
        holder = ""
        while (found := self._store.compare_set(_FIRST, holder, str(rank)).decode()) != str(rank):
            holder, until = found, time.monotonic() + _PUBLISHED_SECONDS
            while time.monotonic() < until:
                if (fault := self.read()) is not None:
                    return fault
                meanwhile()
                time.sleep(_LOOK_SECONDS)
        return None

    def is_claimed(self) -> bool:
        """Return whether a rank has failed and is about to publish why."""
        return bool(self._store.check([_FIRST]))

    def publish(self, fault: Fault) -> None:
        """Publish the fault to all ranks, each of which then ends."""
        self._store.set(_FAULT, json.dumps(attrs.asdict(fault)))
        self._store.add(_CHANGES, 1)

    def read(self) -> Fault | None:
        """Return the fault, if there is one."""
        return Fault(**json.loads(self._store.get(_FAULT))) if self._store.check([_FAULT]) else None

    def open_directory(self) -> None:
        """Record that rank 0 holds the run directory, so that all ranks may write there."""
        self._store.set(_DIRECTORY, "")

    def has_directory(self) -> bool:
        """Return whether rank 0 holds the run directory."""
        return bool(self._store.check([_DIRECTORY]))

    def last_query(self) -> int:
        """Return the number of the last status query, 0 before the first."""
        return int(self._store.add(_QUERY, 0))

    def begin_query(self) -> int:
        """Begin a status query, which every rank answers, and return its number."""
        number = int(self._store.add(_QUERY, 1))
        self._store.add(_CHANGES, 1)
        return number

    def report(self, rank: int, status: Status) -> None:
        """Store the status of a rank."""
        self._store.set(f"status.{rank}", json.dumps(attrs.asdict(status)))

    def statuses(self, ranks: Iterable[int]) -> dict[int, Status]:
        """Return the last status of each of these ranks that has stored one."""
        found = {}
        for rank in ranks:
            if self._store.check([f"status.{rank}"]):
                stored = json.loads(self._store.get(f"status.{rank}"))
                found[rank] = Status(**{**stored, "peers": tuple(stored["peers"])})
        return found

    def query(
        self, ranks: Collection[int], seconds: float, meanwhile: Callable[[], object] = lambda: None
    ) -> dict[int, Status]:
        """Begin a status query, and return what ranks answer in time; it ends early when all have answered.

        Args:
            ranks: whose answers are awaited.
            seconds: to wait at most.
            meanwhile: called again and again, so that this thread can answer queries itself, those of others too.
        """
        number, until = self.begin_query(), time.monotonic() + seconds
        found: dict[int, Status] = {}
        while True:
            meanwhile()
            asked = [rank for rank in ranks if rank not in found]
            answers = self.statuses(asked).items()
            found |= {rank: status for rank, status in answers if status.query >= number or status.left}
            if len(found) == len(ranks) or time.monotonic() > until:
                return found
            time.sleep(_LOOK_SECONDS)

    def finish(self, rank: int) -> None:
        """Record that a rank no longer needs the store."""
        self._store.set(f"{_FINISHED}.{rank}", "")

    def wait_for_all(self, world: int, seconds: float | None = None) -> None:
        """Wait until all ranks have finished, as the host of the store must; a few seconds if the run has failed."""
        names = [f"{_FINISHED}.{rank}" for rank in range(world)]
        until = time.monotonic() + (_FINISHED_SECONDS if seconds is None else seconds)
        while not self._store.check(names) and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
