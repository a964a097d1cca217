"""What this process does now and which ranks it waits for: written by the main thread, read by the watchdog.

A `Heartbeat` belongs to one process; a `Status` is what the other processes read of it. The boundary reports the rank
that it waits for. Inside a collective the stack of the main thread shows it, so that models, optimizers and checkpoints
need not report their collectives.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from types import FrameType
from typing import Protocol

import attrs

from mimo.topology import show_ranks

_COLLECTIVES = "mimo.topology.collectives"
"""Its functions call those of torch, whose names differ between releases."""
_WAITING_MODULES = ("torch.distributed", _COLLECTIVES, "mimo.optimizer.runtime._agreement")
"""Modules in which a process waits for others: collectives, and the reduction of a step, which waits for the GPU."""
_WRAPPER = ".c10d_logger"
_TORCH = "torch."


class Activity(Protocol):
    """A part of a step, such as an action of a plan. The watchdog's thread asks it to describe itself."""

    def describe(self) -> str:
        """Return what is done and to what, such as ``forward of vision stage 0, microbatch 1``."""

    def collective_ranks(self) -> tuple[int, ...]:
        """Return the ranks of its collective, this one included; empty if it has none, or the stack shows them."""


@attrs.define(eq=False)
class Heartbeat:
    """What this process does. The main thread writes, the watchdog reads; nothing is locked.

    Attributes:
        doing: a few words; empty where it may take any time.
        activity: the part of a step that runs.
        awaited: the edge and the rank that it waits for.
        unfinished: the same of messages that its device may still wait for, and whether they have come, first ones
            first.
        changes: how often any of this has changed.
        stops: whether this process has been asked to stop when it has saved.
        stack: where the error was raised that this process reports, inner frames first; None while there is none.
    """

    doing: str = ""
    activity: Activity | None = None
    awaited: tuple[str, int] | None = None
    unfinished: deque[tuple[str, int, Callable[[], bool]]] = attrs.field(factory=deque)
    changes: int = 0
    stops: bool = False
    stack: tuple[FrameType, ...] | None = None

    def enter(self, doing: str) -> None:
        """Set what is done from now on."""
        self.doing, self.activity, self.awaited = doing, None, None
        self.changes += 1

    @contextlib.contextmanager
    def within(self, doing: str) -> Iterator[None]:
        """Set what is done within a block, and set it back after the block."""
        before = self.doing
        self.enter(doing)
        yield
        self.enter(before)

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Add within a block, to what is done, that data is waited for; the part of the step stays as it is."""
        before = self.doing
        self.doing = f"{before}, waiting for data" if before else before
        self.changes += 1
        yield
        self.doing = before
        self.changes += 1

    def fail(self, error: BaseException) -> None:
        """Record that an error has been raised."""
        self.stack = tuple(frame for frame, _ in traceback.walk_tb(error.__traceback__))[::-1]

    def begin(self, activity: Activity | None) -> None:
        """Record the part of the step that begins; None: all are done."""
        self.activity = activity
        self.changes += 1

    def wait(self, edge: str, peer: int) -> None:
        """Record the edge and the rank that this process waits for."""
        self.awaited = edge, peer
        self.changes += 1

    def resume(self, is_over: Callable[[], bool] = lambda: True) -> None:
        """Record that it no longer waits, though its device may until ``is_over``."""
        while self.unfinished and _is_over(self.unfinished[0][2]):
            self.unfinished.popleft()
        if self.awaited is not None and not _is_over(is_over):
            self.unfinished.append((*self.awaited, is_over))
        self.awaited = None
        self.changes += 1


@attrs.frozen(kw_only=True)
class Status:
    """What one rank does, as the other ranks read it.

    Args:
        doing: a few words; empty where nothing is known.
        part: the module, stage and microbatches, and what is done to them; empty outside of a plan.
        waits: whether it waits for other ranks.
        peers: the ranks it waits for; empty for all.
        through: the edge or the collective in which it waits.
        where: the line of code; empty if it waits on an edge.
        seconds: for how long none of this has changed.
        query: the number of the status query that it answers; 0 for none.
        left: whether this process ends, or reports its own error.
    """

    doing: str = ""
    part: str = ""
    waits: bool = False
    peers: tuple[int, ...] = ()
    through: str = ""
    where: str = ""
    seconds: float = 0.0
    query: int = 0
    left: bool = False

    @classmethod
    def of(cls, progress: Heartbeat, *, rank: int, seconds: float, query: int) -> Status:
        """Return the status of this process; it may be called in any thread."""
        doing, activity, awaited = progress.doing, progress.activity, progress.awaited
        part = "" if activity is None else activity.describe()
        status = cls(doing=doing, part=part, seconds=seconds, query=query)
        if awaited is not None:
            return attrs.evolve(status, waits=True, peers=(awaited[1],), through=f"edge {awaited[0]}")
        met, peers, where = _look_at(_stack() if progress.stack is None else progress.stack)
        if met and (message := _first_left(tuple(progress.unfinished))) is not None:
            return attrs.evolve(status, waits=True, peers=(message[1],), through=f"edge {message[0]}, on the device")
        status = attrs.evolve(status, waits=bool(met), peers=peers, through=met, where=where)
        if activity is not None and (ranks := activity.collective_ranks()):
            others = tuple(other for other in ranks if other != rank)
            return attrs.evolve(status, waits=bool(others), peers=status.peers or others)
        return status

    @property
    def activity(self) -> str:
        """What it does, and to which part of the model."""
        return ", ".join(filter(None, [self.doing, self.part]))

    def describe_wait(self, rank: int) -> str:
        """Return where a rank waits and for which ranks; three or more include itself, so that all show one text."""
        peers = [peer for peer in self.peers if peer != rank or len(self.peers) > 2]  # noqa: PLR2004 -- it and another
        ranks = "all ranks" if not peers else f"rank {peers[0]}" if len(peers) == 1 else f"ranks {show_ranks(peers)}"
        return f"in {self.activity}, for {ranks}" + (f" ({self.through})" if self.through else "")


def group_timeout(timeout: float) -> timedelta:
    """Return the time-out of process groups: longer than the watchdog's, which says more."""
    return timedelta(days=1, seconds=timeout)


def _first_left(messages: Iterable[tuple[str, int, Callable[[], bool]]]) -> tuple[str, int] | None:
    """Return the edge and the rank of the first message that has not come; None if all have."""
    return next(((edge, peer) for edge, peer, is_over in messages if not _is_over(is_over)), None)


def _is_over(message: Callable[[], bool]) -> bool:
    """Return whether a message has come; one that has failed never will."""
    with contextlib.suppress(RuntimeError):
        return message()
    return False


def _stack() -> Iterator[FrameType]:
    """Yield the frames of the main thread, inner ones first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 -- documented, and no other way
    while frame is not None:
        yield frame
        frame = frame.f_back


def _look_at(stack: Iterable[FrameType]) -> tuple[str, tuple[int, ...], str]:
    """Return the innermost collective of a stack, its ranks (empty: all), and the line of code outside of torch."""
    met = ""
    peers: tuple[int, ...] = ()
    for frame in stack:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith(_WAITING_MODULES) and not module.endswith(_WRAPPER):
            met, peers = frame.f_code.co_name, _ranks_of(frame) or peers
        if not module.startswith((_TORCH, _COLLECTIVES)):
            return met, peers, f"{module}, line {frame.f_lineno}"
    return met, peers, ""


def _ranks_of(frame: FrameType) -> tuple[int, ...]:
    """Return the ranks of a collective's group argument; empty if it is all ranks, or unknown."""
    from torch import distributed as dist

    group = frame.f_locals.get("group")
    if isinstance(group, dist.ProcessGroup):
        with contextlib.suppress(KeyError, ValueError, RuntimeError):  # it is being destroyed
            return tuple(dist.get_process_group_ranks(group))
    return ()
