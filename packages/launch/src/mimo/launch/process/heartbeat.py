"""What this process does now, and whom it waits for: set by assignments alone, read by the thread that watches.

A `Heartbeat` is this process's own; a `Status` is what others read of it. The boundary says which rank is waited for.
Inside a collective the stack of the main thread says it: every model, optimizer and checkpoint has collectives, and
none of them would remember to tell.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from datetime import timedelta
from types import FrameType
from typing import Protocol

import attrs

from mimo.topology import show_ranks

_COLLECTIVES = "mimo.topology.collectives"
"""Passes calls on to torch, whatever it calls them in its own releases."""
_MEETING = ("torch.distributed", _COLLECTIVES, "mimo.optimizer.runtime._agreement")
"""Modules in which a process waits for others: collectives, and the agreement, where a GPU's answer is awaited."""
_WRAPPER = ".c10d_logger"
_TORCH = "torch."


class Activity(Protocol):
    """A part of a step, such as an action of a plan. It is described only where somebody asks, in another thread."""

    def describe(self) -> str:
        """Return what is done and to what, such as ``forward of vision stage 0, microbatch 1``."""

    def meeting_ranks(self) -> tuple[int, ...]:
        """Return the ranks that meet in it, this one included; empty where none do, or where the stack shows it."""


@attrs.define(eq=False)
class Heartbeat:
    """What this process does. The main thread writes, the one that watches reads; nothing is locked.

    Attributes:
        doing: a few words; empty where nobody is to watch how long it takes.
        activity: the part of a step that runs.
        awaited: the edge and the rank that it waits for.
        changes: how often any of this has changed.
        stops: whether this process has been asked to stop when it has saved.
        stack: where an error came up that is being told, inner frames first; None while all is well.
    """

    doing: str = ""
    activity: Activity | None = None
    awaited: tuple[str, int] | None = None
    changes: int = 0
    stops: bool = False
    stack: tuple[FrameType, ...] | None = None

    def enter(self, doing: str) -> None:
        """Say what is done from now on."""
        self.doing, self.activity, self.awaited = doing, None, None
        self.changes += 1

    @contextlib.contextmanager
    def within(self, doing: str) -> Iterator[None]:
        """Say what is done within a block; after it, it is again what it was."""
        before = self.doing
        self.enter(doing)
        yield
        self.enter(before)

    def fail(self, error: BaseException) -> None:
        """Say that what was done has come to an error."""
        self.stack = tuple(frame for frame, _ in traceback.walk_tb(error.__traceback__))[::-1]

    def begin(self, activity: Activity | None) -> None:
        """Take note of a part of the step that begins; None: all are done."""
        self.activity = activity
        self.changes += 1

    def wait(self, edge: str, peer: int) -> None:
        """Take note of the edge and the rank that are waited for."""
        self.awaited = edge, peer
        self.changes += 1

    def resume(self) -> None:
        """Take note that it waits no longer."""
        self.awaited = None
        self.changes += 1


@attrs.frozen(kw_only=True)
class Status:
    """What one rank is told to do, for others to read.

    Args:
        doing: a few words; empty where nothing is known.
        part: the module, stage and microbatches, and what is done to them; empty outside of a plan.
        waits: whether it waits for other ranks.
        peers: for which; empty for all.
        through: on which edge, or in which collective.
        where: the line of code; empty if it waits on an edge.
        seconds: for how long nothing of this has changed.
        roll: the roll call that it answers; 0 for none.
        left: whether this process has come to its end, or tells of its own error.
    """

    doing: str = ""
    part: str = ""
    waits: bool = False
    peers: tuple[int, ...] = ()
    through: str = ""
    where: str = ""
    seconds: float = 0.0
    roll: int = 0
    left: bool = False

    @classmethod
    def of(cls, progress: Heartbeat, *, rank: int, seconds: float, roll: int) -> Status:
        """Return the mark of this process; call it in any thread."""
        doing, activity, awaited = progress.doing, progress.activity, progress.awaited
        part = "" if activity is None else activity.describe()
        mark = cls(doing=doing, part=part, seconds=seconds, roll=roll)
        if awaited is not None:
            return attrs.evolve(mark, waits=True, peers=(awaited[1],), through=f"edge {awaited[0]}")
        met, peers, where = _look_at(_stack() if progress.stack is None else progress.stack)
        mark = attrs.evolve(mark, waits=bool(met), peers=peers, through=met, where=where)
        if activity is not None and (meeting := activity.meeting_ranks()):
            others = tuple(other for other in meeting if other != rank)
            return attrs.evolve(mark, waits=bool(others), peers=mark.peers or others)
        return mark

    @property
    def place(self) -> str:
        """What it does, and to what."""
        return ", ".join(filter(None, [self.doing, self.part]))

    def told(self, rank: int) -> str:
        """Return whom a rank waits for, as text; of many, itself included, so that all of them tell the same."""
        peers = [peer for peer in self.peers if peer != rank or len(self.peers) > 2]  # noqa: PLR2004 -- it and another
        ranks = "all ranks" if not peers else f"rank {peers[0]}" if len(peers) == 1 else f"ranks {show_ranks(peers)}"
        return f"in {self.place}, for {ranks}" + (f" ({self.through})" if self.through else "")


def group_timeout(timeout: float) -> timedelta:
    """Return the time-out of process groups: so long that ours, which names who is waited for, is always the first."""
    return timedelta(days=1, seconds=timeout)


def _stack() -> Iterator[FrameType]:
    """Yield the frames of the main thread, inner ones first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 -- documented, and no other way
    while frame is not None:
        yield frame
        frame = frame.f_back


def _look_at(stack: Iterable[FrameType]) -> tuple[str, tuple[int, ...], str]:
    """Return the collective in which a stack is, with its ranks (empty: all), and the line of code outside of torch."""
    met = ""
    peers: tuple[int, ...] = ()
    for frame in stack:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith(_MEETING) and not module.endswith(_WRAPPER):
            met, peers = frame.f_code.co_name, _ranks_of(frame) or peers
        if not module.startswith((_TORCH, _COLLECTIVES)):
            return met, peers, f"{module}, line {frame.f_lineno}"
    return met, peers, ""


def _ranks_of(frame: FrameType) -> tuple[int, ...]:
    """Return the ranks of the group that a collective was given; empty if it is everybody, or can't be seen."""
    from torch import distributed as dist

    group = frame.f_locals.get("group")
    if isinstance(group, dist.ProcessGroup):
        with contextlib.suppress(KeyError, ValueError, RuntimeError):  # it is being destroyed
            return tuple(dist.get_process_group_ranks(group))
    return ()
