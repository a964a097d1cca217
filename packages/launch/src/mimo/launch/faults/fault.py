"""Why a run failed, and the board in the shared store on which the first rank to fail writes it for the others.

A rank that waits for a living peer is never told that another one has died, so death is spread by us.
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
from typing import TYPE_CHECKING, Self, TypeAlias

import attrs

from mimo.hooks import UserError, plain_text
from mimo.launch.process.heartbeat import Status

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

EXIT_FAILED = 3
EXIT_INTERRUPTED = 130
_FIRST, _FAULT, _BELL, _ROLL, _FINISHED = "fault.first", "fault", "bell", "roll", "finished"
_DIRECTORY = "directory"
_PUBLISHED_SECONDS = 20.0
_FINISHED_SECONDS = 10.0
_WRITE_SECONDS = 3.0
_LOOK_SECONDS = 0.05
_LOST = ("Connection closed by peer", "Connection reset by peer", "Connection refused", "gloo", "NCCL", "Broken pipe")
_NO_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "Cannot allocate memory", "std::bad_alloc")
_NO_THREAD = "can't start new thread"
_TRY_AGAIN = frozenset(f"{number}Resource temporarily unavailable" for number in ("", f"[Errno {errno.EAGAIN}] "))
"""All that is said where no thread or process can be started; of a file that is locked, more is said."""


@attrs.frozen(kw_only=True)
class Fault:
    """What ended a run.

    Args:
        rank: where.
        code: exit code that every process takes.
        text: what the user reads, rank included.
        explained: whether the text is an error of ours, which needs no other cause.
        waits: where the other ranks waited, a line each.
    """

    rank: int
    code: int
    text: str
    explained: bool
    waits: str = ""

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Self:
        """Return the fault that an exception is; only errors that a user can act on are shown without a traceback."""
        if isinstance(error, UserError):
            return cls(rank=rank, code=error.exit_code, text=f"rank {rank}: {error}", explained=True)
        text = "".join(traceback.format_exception(error)).rstrip()
        summary = traceback.format_exception_only(error)[-1].strip()
        said = f"rank {rank} {lack}: {summary}" if (lack := lack_of(error)) else f"rank {rank} failed: {summary}"
        return cls(rank=rank, code=EXIT_FAILED, text=f"{text}\n{said}", explained=bool(lack))

    @classmethod
    def of_exit(cls, rank: int, exit_code: int, why: str = "") -> Self:
        """Return the fault that a process is which ended without saying why.

        Args:
            rank: which.
            exit_code: negative for signals.
            why: what is known of it all the same; a sentence.
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
    """Hand a fault on, for a few seconds: a disk that is full or doesn't answer must not keep anybody."""
    if on_failure is None:
        return

    def write() -> None:
        with contextlib.suppress(OSError):
            on_failure(fault)

    writer = threading.Thread(target=write, name="mimo-fault", daemon=True)
    try:
        writer.start()
    except RuntimeError:  # no thread can be started any more, which may be what is to be told
        write()
        return
    writer.join(_WRITE_SECONDS)


def lack_of(error: BaseException) -> str:
    """Return what this machine or a limit of it refused to a process, and which limit that is; empty if nothing."""
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
    """Tell whether an error may only mean that another process is gone: a lost connection, which names but a port."""
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
"""Is called with what ended a run, by whoever was the first to know, before any other process ends because of it."""


class FaultStore:
    """The first fault of a run, told to all its processes, and what each of them does when somebody asks.

    Args:
        store: a client that nothing else waits on.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def rings(self) -> int:
        """Return how often something was put up that all should read: one small question, asked again and again."""
        return int(self._store.add(_BELL, 0))

    def claim(self, rank: int) -> bool:
        """Tell whether this rank is the first to fail; it must then `publish` why."""
        found: bytes = self._store.compare_set(_FIRST, "", str(rank))
        return int(found) == rank

    def first(self, rank: int, meanwhile: Callable[[], object] = lambda: None) -> Fault | None:
        """Claim to be the first to fail, or return the fault of the rank that was.

        Args:
            rank: this one, which must `publish` why if nothing is returned.
            meanwhile: called again and again while that rank is waited for; one that doesn't say why loses its claim.
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
        """Tell whether a rank has failed, and is about to say why."""
        return bool(self._store.check([_FIRST]))

    def publish(self, fault: Fault) -> None:
        """Tell everybody; from now on every process ends."""
        self._store.set(_FAULT, json.dumps(attrs.asdict(fault)))
        self._store.add(_BELL, 1)

    def read(self) -> Fault | None:
        """Return the fault, if there is one."""
        return Fault(**json.loads(self._store.get(_FAULT))) if self._store.check([_FAULT]) else None

    def open_directory(self) -> None:
        """Say that rank 0 holds the run directory, so that all may write there."""
        self._store.set(_DIRECTORY, "")

    def has_directory(self) -> bool:
        """Tell whether rank 0 holds the run directory."""
        return bool(self._store.check([_DIRECTORY]))

    def roll(self) -> int:
        """Return the number of the last roll call, 0 before the first."""
        return int(self._store.add(_ROLL, 0))

    def call_roll(self) -> int:
        """Ask every process what it does, and return the number of this call."""
        number = int(self._store.add(_ROLL, 1))
        self._store.add(_BELL, 1)
        return number

    def tell(self, rank: int, mark: Status) -> None:
        """Put up what a rank does."""
        self._store.set(f"mark.{rank}", json.dumps(attrs.asdict(mark)))

    def marks(self, ranks: Iterable[int]) -> dict[int, Status]:
        """Return what ranks have put up last; those are left out that never have."""
        found = {}
        for rank in ranks:
            if self._store.check([f"mark.{rank}"]):
                told = json.loads(self._store.get(f"mark.{rank}"))
                found[rank] = Status(**{**told, "peers": tuple(told["peers"])})
        return found

    def answers(
        self, ranks: Collection[int], seconds: float, meanwhile: Callable[[], object] = lambda: None
    ) -> dict[int, Status]:
        """Call the roll, and return what ranks answer within a time; no longer is waited than until all have.

        Args:
            ranks: that are asked.
            seconds: which they have.
            meanwhile: called again and again, where this thread itself must answer, and others who ask.
        """
        number, until = self.call_roll(), time.monotonic() + seconds
        found: dict[int, Status] = {}
        while True:
            meanwhile()
            asked = [rank for rank in ranks if rank not in found]
            found |= {rank: mark for rank, mark in self.marks(asked).items() if mark.roll >= number or mark.left}
            if len(found) == len(ranks) or time.monotonic() > until:
                return found
            time.sleep(_LOOK_SECONDS)

    def finish(self, rank: int) -> None:
        """Say that a rank no longer needs the store."""
        self._store.set(f"{_FINISHED}.{rank}", "")

    def wait_for_all(self, world: int, seconds: float | None = None) -> None:
        """Wait until all ranks have finished, as whoever hosts the store must; a few seconds if the run has failed."""
        names = [f"{_FINISHED}.{rank}" for rank in range(world)]
        until = time.monotonic() + (_FINISHED_SECONDS if seconds is None else seconds)
        while not self._store.check(names) and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
