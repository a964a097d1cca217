"""What one process of a run does around its task: join the others, be watched, tell its own fault."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import TypeAlias

import attrs
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from mimo.launch.faults.fault import EXIT_FAILED, Fault, FaultStore, is_consequence, report_in_time
from mimo.launch.faults.hang_report import show_silent, show_waits
from mimo.launch.faults.store import unlogged
from mimo.launch.faults.watchdog import Terms, Watchdog, end
from mimo.launch.process.heartbeat import Status, group_timeout
from mimo.launch.process.process_info import ProcessInfo, local_world, with_slurm
from mimo.launch.start.rendezvous import Meeting
from mimo.launch.start.world import join_world

Task: TypeAlias = Callable[[ProcessInfo], object]
Connect: TypeAlias = Callable[[], Store]

_USUAL = Meeting()
_CLAIM_SECONDS = 2.0
"""In which a death is told by whoever saw it, before those who lost a connection look for it themselves."""
_ANSWER_SECONDS = 5.0
_TELL_SECONDS = 3.0
_LOOK_SECONDS = 0.05


def run_task(
    task: Task,
    place: ProcessInfo,
    connect: Connect,
    *,
    terms: Terms,
    shows: bool,
    hosts: bool = False,
    launcher: Connection | None = None,
    meeting: Meeting = _USUAL,
) -> None:
    """Run a task as one rank, its process group initialised; ends the process if it fails.

    Args:
        task: what to run.
        place: this process.
        connect: opens a new client of the store that all ranks share.
        terms: under which it runs.
        shows: whether this process is the one to show its own error.
        hosts: whether the store lives in this process, which then must outlive the others.
        launcher: can be read from when the launcher that started this process, and hosts the store, is gone.
        meeting: by what backend the ranks send.
    """
    worker = _Worker(place, FaultStore(connect()), terms, shows=shows, hosts=hosts)
    watch = Watchdog(
        FaultStore(connect()), place, terms, shows=shows, tell=worker.tell, leave=worker.leave, launcher=launcher
    )
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    try:
        watch.start()
        if place.rank == 0:
            if terms.enter is not None:
                terms.enter().keep()  # it waits for a bounded time, which nobody need watch
            worker.board.open_directory()
        _prepare(place)
        place.progress.doing = "the first meeting of all ranks"
        backend = meeting.backend(place.device)
        place = join_world(place, connect(), timeout=group_timeout(terms.timeout), backend=backend)
        if place.rank == 0 and terms.on_start is not None and not worker.board.is_claimed():
            terms.on_start()
        place.progress.enter("")
        task(place)
        place.progress.enter("")
        dist.destroy_process_group()
    except BaseException as error:  # noqa: BLE001 -- whatever it is, the other ranks must end too
        worker.fail(error, watch)
    watch.leaving = True
    with contextlib.suppress(RuntimeError):  # the store has ended with its host: all is done
        if hosts:
            worker.board.finish(place.rank)
            worker.board.wait_for_all(place.world, terms.timeout)
        watch.stop()
        if not hosts:
            worker.board.tell(place.rank, Status(left=True))  # for those who call the roll later
            worker.board.finish(place.rank)


def threads_for(place: ProcessInfo, environ: Mapping[str, str]) -> int | None:
    """Return how many threads a process on CPU should use, or None if the user has said so."""
    if "OMP_NUM_THREADS" in environ:
        return None
    cores = len(os.sched_getaffinity(0))
    return max(1, cores // local_world(environ, place.world))


def _prepare(place: ProcessInfo) -> None:
    if place.device.startswith("cuda"):
        torch.cuda.set_device(torch.device(place.device))
        return
    threads = threads_for(place, with_slurm(os.environ))
    if threads is not None:
        torch.set_num_threads(threads)


@attrs.frozen
class _Worker:
    """Tells why this process fails, if it is the first to, and ends it."""

    place: ProcessInfo
    board: FaultStore
    terms: Terms
    shows: bool = attrs.field(kw_only=True)
    hosts: bool = attrs.field(kw_only=True)
    once: threading.Lock = attrs.field(factory=threading.Lock, kw_only=True)

    def fail(self, error: BaseException, watch: Watchdog) -> None:
        """Tell of an error; one that only follows from another rank's end leaves it to those who know more."""
        progress, rank = self.place.progress, self.place.rank
        follows = is_consequence(error)
        if watch.is_orphan():  # what the others suffer from that, or this one; the thread that watches says so
            time.sleep(_TELL_SECONDS)
            end(EXIT_FAILED)
        progress.fail(error)
        watch.leaving = not follows
        try:
            until = time.monotonic() + (_CLAIM_SECONDS if follows else 0.0)
            with unlogged():
                while not self.board.is_claimed() and time.monotonic() < until:
                    time.sleep(_LOOK_SECONDS)
                told = self.board.first(rank)
            if told is not None:
                self.leave(told.code)
            self.tell(self._fault(error, follows=follows))
        except RuntimeError:  # the store is gone: nobody left to tell, and the thread that watches ends this process
            time.sleep(_TELL_SECONDS)
            end(EXIT_FAILED)

    def _fault(self, error: BaseException, *, follows: bool) -> Fault:
        """Return what an error is, with what the others do meanwhile, and without some of them if that explains it."""
        fault, everybody = Fault.of(error, self.place.rank), range(self.place.world)
        if not self.place.progress.doing or self.place.world == 1:
            return fault
        marks = self.board.answers(everybody, _ANSWER_SECONDS if follows else _TELL_SECONDS)
        silent = set(everybody) - marks.keys()
        if follows and silent:
            fault = attrs.evolve(fault, text=show_silent(silent, self.board.marks(silent)))
        return attrs.evolve(fault, waits=show_waits(marks))

    def tell(self, fault: Fault) -> None:
        """Tell a fault that this process was the first to claim, and end.

        Written is before published, as others then end us; and only for so long that a dead disk keeps nobody.
        """
        self.once.acquire()  # the other thread that tells ends this one
        if self.shows:
            with contextlib.suppress(OSError):
                sys.stderr.write(f"mimo: {fault.shown}\n")
                sys.stderr.flush()
        if self._may_write():
            report_in_time(self.terms.on_failure, fault)
        with contextlib.suppress(RuntimeError):
            self.board.publish(fault)
        self._end(fault.code)

    def _may_write(self) -> bool:
        """Tell whether this run holds its directory; until then another one may."""
        with contextlib.suppress(RuntimeError):  # the store is gone
            return self.board.has_directory()
        return False

    def leave(self, code: int) -> None:
        """End with the code of a fault that another rank has told."""
        self.once.acquire()
        self._end(code)

    def _end(self, code: int) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone
            self.board.finish(self.place.rank)
            if self.hosts:
                self.board.wait_for_all(self.place.world)
        end(code)
