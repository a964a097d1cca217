"""The watchdog thread of a rank: it looks for faults of other ranks, for a lack of progress, and for signals."""

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
_LOOKS_A_SECOND = 2500
"""How many looks at the store all ranks together may make in a second: more ranks look less often each."""
_GAP_SECONDS = 1.0
"""A longer time between two looks means that the whole process was stopped, as by Ctrl-Z, and doesn't count."""
START_SECONDS = 120.0
"""Ranks join minutes apart where they import from slow disks."""
_ANSWER_SECONDS = 10.0
_REPORT_SECONDS = 1.0
_REPORTS_A_SECOND = 200
"""How many statuses all ranks together may store in a second without a query, for ranks that later can't answer."""
SAME_SECONDS = 1.0
"""Signals that come this soon after the first are one request, as a process and its group both get them."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask a run to save and end; SIGHUP is none of them under nohup."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGHUP) if hangs_up else (signal.SIGTERM,)


@attrs.frozen(kw_only=True)
class Terms:
    """How a task is watched, and what is called when it starts and fails.

    To reach fresh interpreters, as on GPUs, what is called must be functions that can be pickled, as the task is.

    Args:
        timeout: seconds without progress on any rank after which the run ends.
        stops: whether the task reads `Heartbeat.stops`, and so ends by itself after SIGTERM or SIGHUP.
        on_failure: called with the fault that ended the run, once rank 0 holds the run directory; it may write there.
        on_hang: likewise, with its rank on each one that still answers, where the run ends as ranks stand still.
        on_start: called on rank 0 when all ranks have joined and none has failed.
        enter: called on rank 0 to lock the run directory before any rank writes there; None where it needs no lock, or
            the launcher has it.
        lock: on the run directory, which the launcher holds, and rank 0 after it.
    """

    timeout: float = 600.0
    stops: bool = False
    on_failure: OnFailure | None = None
    on_hang: Callable[[int], None] | None = None
    on_start: Callable[[], None] | None = None
    enter: Callable[[], RunLock] | None = None
    lock: RunLock | None = None


class Watchdog(threading.Thread):
    """Watches over this process until `stop`; make it in the main thread.

    It ends the process when another one has failed, or when the store is gone with the process that hosts it. It stores
    the status of this process; when that has not changed for too long it queries all ranks and names those that block
    them. It is a thread, since the main one may be inside a collective that never returns.

    Args:
        fault_store: with a client that no other thread uses.
        process: this one.
        terms: how long it may make no progress, and whether SIGTERM is a request.
        shows: whether this process prints what it finds.
        report: prints and publishes a fault that this process was the first to claim, and ends it.
        leave: ends this process because of another one's fault.
        launcher: becomes readable when the launcher that started this process is gone; None without a launcher of ours.
    """

    def __init__(
        self,
        fault_store: FaultStore,
        process: ProcessInfo,
        terms: Terms,
        *,
        shows: bool,
        report: Callable[[Fault], None],
        leave: Callable[[Fault], None],
        launcher: Connection | None = None,
    ) -> None:
        super().__init__(name="mimo-watch", daemon=True)
        self._fault_store = fault_store
        self._process = process
        self._terms = terms
        self._shows = shows
        self._report = report
        self._leave = leave
        self._launcher = launcher
        self._done = threading.Event()
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._look_seconds = max(_LOOK_SECONDS, process.world / _LOOKS_A_SECOND)
        self._report_seconds = max(_REPORT_SECONDS, process.world / _REPORTS_A_SECOND)
        self._seen = self._read_changes = self._answered = 0
        self._changed = self._clock = 0.0
        self._reported = -self._report_seconds
        self._patience = self._limit
        self._stop_asked: float | None = None
        self._has_failed = False
        self.leaving = False
        """Whether the main thread ends, or reports its own error."""
        self._signals = stop_signals() if terms.stops else ()
        self._handle_signals()

    def run(self) -> None:
        """Look at the fault store, the clock and signals again and again."""
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
            except Exception:  # noqa: BLE001 -- a look that fails is reported once, and the next one may succeed
                if not self._has_failed:
                    traceback.print_exc()
                self._has_failed = True

    def stop(self) -> None:
        """Stop looking; returns when the thread has ended."""
        self._done.set()
        self._sender.send(b"\0")
        self.join()
        if self._signals:
            signal.set_wakeup_fd(-1)
        for number in self._signals:
            signal.signal(number, signal.SIG_IGN)  # a handler of Python's is gone before the process is

    def is_orphan(self) -> bool:
        """Return whether the launcher is gone, and the store with it: this thread then ends the process."""
        return self._launcher is not None and self._launcher.poll()

    def _handle_signals(self) -> None:
        """Receive signals in this thread: the main one may be where no handler of Python's runs."""
        if self._signals:
            signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        for number in self._signals:
            signal.signal(number, lambda *_: None)
            signal.siginterrupt(number, False)

    def _pause(self) -> None:
        sources: list[socket.socket | Connection] = [self._receiver]
        if self._launcher is not None:
            sources.append(self._launcher)
        ready = select.select(sources, [], [], self._look_seconds)[0]
        if self._launcher in ready:
            self._lose_launcher()
        received = set(self._receiver.recv(4096)) if self._receiver in ready else set()
        if not received.isdisjoint(self._signals):
            now = time.monotonic()
            again = self._stop_asked is not None and now > self._stop_asked + SAME_SECONDS
            if again and signal.SIGTERM in received and self._shows:  # a terminal that goes may send several SIGHUPs
                end(128 + signal.SIGTERM)  # under our launcher the launcher counts signals
            self._stop_asked = self._stop_asked or now
            self._process.heartbeat.stops = True

    def _look(self) -> None:
        progress = self._process.heartbeat
        if progress.changes != self._seen:
            self._seen, self._changed, self._patience = progress.changes, self._clock, self._limit
        if (changes := self._fault_store.changes()) != self._read_changes:
            self._read_changes = changes
            self._read_store()
        if self._clock >= self._reported + self._report_seconds:
            self._report_status()
        if progress.doing and not self.leaving and self._stalled_seconds >= self._patience:
            self._query_all()

    def _read_store(self) -> None:
        """Read what has changed: there is a fault, or a status query."""
        fault = self._fault_store.read()
        if fault is not None and not self._done.is_set():
            self._leave(fault)
        if self._answer_query():
            # Another rank already queries.
            self._patience = max(self._patience, self._stalled_seconds + 2 * _ANSWER_SECONDS)

    def _answer_query(self) -> bool:
        """Answer a status query if there is a new one, and return whether there was."""
        if (query := self._fault_store.last_query()) == self._answered:
            return False
        self._answered = query
        self._report_status()
        return True

    def _report_status(self) -> None:
        self._reported = self._clock
        self._fault_store.report(self._process.rank, attrs.evolve(self._status(), left=self.leaving))

    def _status(self) -> Status:
        process = self._process
        return Status.of(process.heartbeat, rank=process.rank, seconds=self._stalled_seconds, query=self._answered)

    @property
    def _stalled_seconds(self) -> float:
        """For how many seconds this process has made no progress."""
        return self._clock - self._changed

    @property
    def _limit(self) -> float:
        """Seconds without progress after which this process queries all; higher ranks wait longer, so that one does."""
        starts = not self._process.heartbeat.changes
        least = max(self._terms.timeout, START_SECONDS) if starts else self._terms.timeout
        return least + self._look_seconds * min(self._process.rank, 25) / 5

    def _query_all(self) -> None:
        """Query the status of all ranks, and end the run unless one of them makes progress."""
        everybody = range(self._process.world)
        statuses = self._fault_store.query(everybody, _ANSWER_SECONDS, self._answer_query)
        silent = set(everybody) - statuses.keys()
        stalled = [status.seconds for status in statuses.values() if not status.left]
        youngest = min(stalled, default=self._stalled_seconds)
        if self._process.heartbeat.changes != self._seen:
            return
        if not silent and youngest < 0.8 * self._terms.timeout:
            self._patience = self._stalled_seconds + self._terms.timeout - youngest
            return
        earlier = self._fault_store.first(self._process.rank, self._answer_query)
        if earlier is not None:
            self._leave(earlier)
            return
        if silent:
            text = show_silent(silent, self._fault_store.statuses(silent))
        else:
            text = show_standstill(statuses, self._terms.timeout)
        waits = show_waits(statuses)
        rank = self._process.rank
        self._report(Fault(rank=rank, code=EXIT_FAILED, text=text, explained=True, waits=waits, hangs=True))

    def _lose_launcher(self) -> None:
        """End before this process uses the store, which is gone too; rank 0 prints why."""
        if self._process.rank == 0:
            text = f"The process that started all ranks is gone. Rank 0 was in {self._doing}."
            self._say(text)
            fault = Fault(rank=0, code=EXIT_FAILED, text=text, explained=True)
            report_in_time(self._terms.on_failure, fault)
        end(EXIT_FAILED)

    def _lose_store(self) -> None:
        """End: the process that hosts the store is gone, and has reported why if it could."""
        if self._launcher is not None:  # it hosts the store; which of its files is closed first can't be known
            self._lose_launcher()
        if self._shows and self._process.rank == 1:
            text = "The process in which all ranks meet is gone: rank 0, or what started it."
            self._say(f"{text} Rank 1 was in {self._doing}.")
        end(EXIT_FAILED)

    @property
    def _doing(self) -> str:
        return self._status().activity or "its start"

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            os.write(sys.stderr.fileno(), f"mimo: {text}\n".encode())


def end(code: int) -> None:
    """End at once, without waiting: other threads may hang in collectives."""
    for stream in (sys.stdout, sys.stderr):
        if threading.current_thread() is threading.main_thread():
            with contextlib.suppress(OSError):  # a full disk, or a terminal that is gone
                stream.flush()
    os._exit(code)
