"""The thread that watches over a rank: for the others' faults, for its own standing still, and for signals."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

import attrs

from mimo.launch.faults.fault import EXIT_FAILED, Fault, FaultStore, OnFailure, report_in_time
from mimo.launch.faults.hang_report import show_silent, show_standstill, show_waits
from mimo.launch.faults.store import unlogged
from mimo.launch.process.heartbeat import Status
from mimo.launch.process.process_info import ProcessInfo
from mimo.launch.process.run_lock import RunLock

_LOOK_SECONDS = 0.2
_RANKS_A_SECOND = 2500
"""How many ranks may look at the store in a second: more of them look less often."""
_GAP_SECONDS = 1.0
"""More than this between two looks is the whole process having stood still, as after Ctrl-Z, and doesn't count."""
START_SECONDS = 120.0
"""Ranks come to their first meeting minutes apart where they import from slow disks."""
_ANSWER_SECONDS = 10.0
_BEAT_SECONDS = 1.0
_MARKS_A_SECOND = 200
"""How many ranks may put up in a second what they do, unasked, for those who can't answer any more."""
SAME_SECONDS = 1.0
"""Signals that come this soon after the first are the same wish, as a process and its group are told."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask a run to save and end; a terminal that goes is none to what nohup started."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGHUP) if hangs_up else (signal.SIGTERM,)


@attrs.frozen(kw_only=True)
class Terms:
    """Under which terms a task runs.

    Args:
        timeout: seconds in which something must go on somewhere.
        stops: whether the task looks at `Heartbeat.stops`, and so ends by itself after SIGTERM or SIGHUP.
        on_failure: is handed what ended the run, once rank 0 holds the run directory; it may write there.
        on_start: is called on rank 0 when all ranks have met and none has failed.
        enter: holds the run directory, on rank 0, before any rank writes there; None where nobody need, or the launcher
            has.
        lock: with which the launcher holds it, and rank 0 after it.
    """

    timeout: float = 600.0
    stops: bool = False
    on_failure: OnFailure | None = None
    on_start: Callable[[], None] | None = None
    enter: Callable[[], RunLock] | None = None
    lock: RunLock | None = None


class Watchdog(threading.Thread):
    """Watches over this process until `stop`; make it in the main thread.

    It ends the process when another one has failed, or when the store is gone and with it whoever hosts it. It puts up
    what this process does, and when that has not changed for too long it asks all others and says who holds them up. A
    thread, since the main one may be inside a collective that never returns.

    Args:
        board: which no other thread waits on.
        place: this process.
        terms: how long nothing may go on, and whether SIGTERM is a wish.
        shows: whether this process is the one to show what it finds.
        tell: shows and publishes a fault that this process was the first to claim, and ends it.
        leave: ends this process with the code of another one's fault.
        launcher: can be read from when the launcher that started this process is gone; None if none of ours did.
    """

    def __init__(
        self,
        board: FaultStore,
        place: ProcessInfo,
        terms: Terms,
        *,
        shows: bool,
        tell: Callable[[Fault], None],
        leave: Callable[[int], None],
        launcher: Connection | None = None,
    ) -> None:
        super().__init__(name="mimo-watch", daemon=True)
        self._board = board
        self._place = place
        self._terms = terms
        self._shows = shows
        self._tell = tell
        self._leave = leave
        self._launcher = launcher
        self._done = threading.Event()
        self._ear, self._mouth = socket.socketpair()
        self._mouth.setblocking(False)
        self._every = max(_LOOK_SECONDS, place.world / _RANKS_A_SECOND)
        self._beat = max(_BEAT_SECONDS, place.world / _MARKS_A_SECOND)
        self._seen = self._rung = self._answered = 0
        self._changed = self._clock = 0.0
        self._told = -self._beat
        self._patience = self._limit
        self._asked: float | None = None
        self._puzzled = False
        self.leaving = False
        """Whether the main thread has come to its end, or tells of its own error."""
        self._signals = stop_signals() if terms.stops else ()
        self._listen()

    def run(self) -> None:
        """Look at the board, the clock and signals."""
        last = time.monotonic()
        while not self._done.is_set():
            self._pause()
            now = time.monotonic()
            self._clock += min(now - last, _GAP_SECONDS)
            last = now
            try:
                with unlogged():
                    self._look()
            except RuntimeError:  # all errors of stores are
                if not self._done.is_set():
                    self._lose_store()
                return
            except Exception:  # noqa: BLE001 -- a look that fails is told of once, and the next may not
                if not self._puzzled:
                    traceback.print_exc()
                self._puzzled = True

    def stop(self) -> None:
        """Stop looking; returns when the thread has ended."""
        self._done.set()
        self._mouth.send(b"\0")
        self.join()
        if self._signals:
            signal.set_wakeup_fd(-1)
        for number in self._signals:
            signal.signal(number, signal.SIG_IGN)  # a handler of Python's is gone before the process is

    def wake(self) -> None:
        """Look at once."""
        self._mouth.send(b"\0")

    def is_orphan(self) -> bool:
        """Tell whether the launcher is gone, and the store with it: this thread then ends the process."""
        return self._launcher is not None and self._launcher.poll()

    def _listen(self) -> None:
        """Hear of signals in this thread: the main one may be where no handler of Python's runs."""
        if self._signals:
            signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        for number in self._signals:
            signal.signal(number, lambda *_: None)
            signal.siginterrupt(number, False)

    def _pause(self) -> None:
        ears: list[socket.socket | Connection] = [self._ear]
        if self._launcher is not None:
            ears.append(self._launcher)
        ready = select.select(ears, [], [], self._every)[0]
        if self._launcher in ready:
            self._lose_launcher()
        heard = set(self._ear.recv(4096)) if self._ear in ready else set()
        if not heard.isdisjoint(self._signals):
            now = time.monotonic()
            again = self._asked is not None and now > self._asked + SAME_SECONDS
            if again and signal.SIGTERM in heard and self._shows:  # a terminal that goes may send several SIGHUPs
                end(128 + signal.SIGTERM)  # under our launcher it is the one to count
            self._asked = self._asked or now
            self._place.progress.stops = True

    def _look(self) -> None:
        progress = self._place.progress
        if progress.changes != self._seen:
            self._seen, self._changed, self._patience = progress.changes, self._clock, self._limit
        if (rung := self._board.rings()) != self._rung:
            self._rung = rung
            self._hear()
        if self._clock >= self._told + self._beat:
            self._put_up()
        if progress.doing and not self.leaving and self._stood >= self._patience:
            self._ask_all()

    def _hear(self) -> None:
        """Read what was put up: a fault, or a roll call."""
        fault = self._board.read()
        if fault is not None and not self._done.is_set():
            self._leave(fault.code)
        if self._answer():
            self._patience = max(self._patience, self._stood + 2 * _ANSWER_SECONDS)  # somebody asks already

    def _answer(self) -> bool:
        """Answer a roll call, if there is a new one, and tell whether there was."""
        if (roll := self._board.roll()) == self._answered:
            return False
        self._answered = roll
        self._put_up()
        return True

    def _put_up(self) -> None:
        self._told = self._clock
        mark = Status.of(self._place.progress, rank=self._place.rank, seconds=self._stood, roll=self._answered)
        self._board.tell(self._place.rank, attrs.evolve(mark, left=self.leaving))

    @property
    def _stood(self) -> float:
        """For how many seconds this process has not gone on."""
        return self._clock - self._changed

    @property
    def _limit(self) -> float:
        """Seconds after which this process asks why; later ranks a little later, so that one asks for all."""
        starts = not self._place.progress.changes
        least = max(self._terms.timeout, START_SECONDS) if starts else self._terms.timeout
        return least + self._every * min(self._place.rank, 25) / 5

    def _ask_all(self) -> None:
        """Ask all ranks what they do, and end the run unless one of them goes on."""
        everybody = range(self._place.world)
        marks = self._board.answers(everybody, _ANSWER_SECONDS, self._answer)
        silent = set(everybody) - marks.keys()
        youngest = min((mark.seconds for mark in marks.values() if not mark.left), default=self._stood)
        if self._place.progress.changes != self._seen:
            return
        if not silent and youngest < 0.8 * self._terms.timeout:
            self._patience = self._stood + self._terms.timeout - youngest
            return
        told = self._board.first(self._place.rank, self._answer)
        if told is not None:
            self._leave(told.code)
            return
        text = show_silent(silent, self._board.marks(silent)) if silent else show_standstill(marks, self._terms.timeout)
        self._tell(Fault(rank=self._place.rank, code=EXIT_FAILED, text=text, explained=True, waits=show_waits(marks)))

    def _lose_launcher(self) -> None:
        """End before anybody asks the store, which is gone too; rank 0 says so."""
        if self._place.rank == 0:
            text = f"The process that started all ranks is gone. Rank 0 was in {self._doing}."
            self._say(text)
            fault = Fault(rank=0, code=EXIT_FAILED, text=text, explained=True)
            report_in_time(self._terms.on_failure, fault)
        end(EXIT_FAILED)

    def _lose_store(self) -> None:
        """End: whoever hosts the store is gone, and has told why if it could."""
        if self._launcher is not None:  # it is the host, and which of its files is closed first can't be known
            self._lose_launcher()
        if self._shows and self._place.rank == 1:
            text = "The process in which all ranks meet is gone: rank 0, or what started it."
            self._say(f"{text} Rank 1 was in {self._doing}.")
        end(EXIT_FAILED)

    @property
    def _doing(self) -> str:
        mark = Status.of(self._place.progress, rank=self._place.rank, seconds=self._stood, roll=0)
        return mark.place or "its start"

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            os.write(sys.stderr.fileno(), f"mimo: {text}\n".encode())


def end(code: int) -> None:
    """End at once: other threads may hang in collectives, so nothing may be waited for."""
    for stream in (sys.stdout, sys.stderr):
        if threading.current_thread() is threading.main_thread():
            with contextlib.suppress(OSError):  # a full disk, or a terminal that is gone
                stream.flush()
    os._exit(code)
