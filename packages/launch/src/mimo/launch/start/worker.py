"""What one process of a run does around its task: it joins the others, starts its watchdog, reports its own fault."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from typing import TypeAlias

import attrs
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from mimo.hooks import count_cores
from mimo.launch.faults.collectives import RECORDED
from mimo.launch.faults.fault import EXIT_FAILED, Fault, FaultStore, call_in_time, is_consequence, report_in_time
from mimo.launch.faults.hang_report import show_silent, show_waits
from mimo.launch.faults.store import unlogged
from mimo.launch.faults.watchdog import Terms, Watchdog, end
from mimo.launch.process.heartbeat import Status, group_timeout
from mimo.launch.process.process_info import ProcessInfo, local_world, with_slurm
from mimo.launch.start.rendezvous import Rendezvous
from mimo.launch.start.world import join_world

Task: TypeAlias = Callable[[ProcessInfo], object]
Connect: TypeAlias = Callable[[], Store]

_USUAL = Rendezvous()
_IN_HOST_ORDER = ("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
"""Kernels of all communicators of a GPU start in the order in which the host issues them, as plans are proved."""
_GROWING = ("PYTORCH_ALLOC_CONF", "expandable_segments:True")
"""Memory of a GPU is asked for in segments that can grow, as rows of ragged batches would leave gaps between others."""
_ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""What glibc's ``mallopt`` calls the free bytes that it gives back to the system, and the size from which on a block is
mapped from the system by itself."""
_MAPPED_BYTES = (1 << 30, 1 << 25)
"""Older releases of glibc refuse the larger."""
_ALL = -1
_CLAIM_SECONDS = 2.0
"""In which the process that saw a death reports it, before those that lost a connection look for the reason."""
_ANSWER_SECONDS = 5.0
_REPORT_SECONDS = 3.0
_LOOK_SECONDS = 0.05


def run_task(
    task: Task,
    process: ProcessInfo,
    connect: Connect,
    *,
    terms: Terms,
    shows: bool,
    hosts: bool = False,
    launcher: Connection | None = None,
    rendezvous: Rendezvous = _USUAL,
) -> None:
    """Run a task as one rank, its process group initialised; ends the process if it fails.

    Args:
        task: what to run.
        process: this one.
        connect: opens a new client of the store that all ranks share.
        terms: under which it runs.
        shows: whether this process prints its own error.
        hosts: whether the store lives in this process, which then must outlive the others.
        launcher: becomes readable when the launcher, which hosts the store, is gone.
        rendezvous: gives the backend of the default group.
    """
    worker = _Worker(process, FaultStore(connect()), terms, shows=shows, hosts=hosts)
    watch = Watchdog(
        FaultStore(connect()), process, terms, shows=shows, report=worker.report, leave=worker.leave, launcher=launcher
    )
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    try:
        watch.start()
        if process.rank == 0:
            if terms.enter is not None:
                terms.enter().keep()  # it waits for a bounded time, which nobody need watch
            worker.fault_store.open_directory()
        prepare(process)
        process.heartbeat.doing = "the first meeting of all ranks"
        backend = rendezvous.backend(process.device)
        process = join_world(process, connect(), timeout=group_timeout(terms.timeout), backend=backend)
        if process.rank == 0 and terms.on_start is not None and not worker.fault_store.is_claimed():
            terms.on_start()
        process.heartbeat.enter("")
        task(process)
        process.heartbeat.enter("")
        dist.destroy_process_group()
    except BaseException as error:  # noqa: BLE001 -- whatever it is, the other ranks must end too
        worker.fail(error, watch)
    watch.leaving = True
    with contextlib.suppress(RuntimeError):  # the store has ended with its host: all is done
        if hosts:
            worker.fault_store.finish(process.rank)
            worker.fault_store.wait_for_all(process.world, terms.timeout)
        watch.stop()
        if not hosts:
            worker.fault_store.report(process.rank, Status(left=True))  # for status queries that come later
            worker.fault_store.finish(process.rank)


def threads_for(process: ProcessInfo, environ: Mapping[str, str]) -> int | None:
    """Return on how many threads a process should compute on the host, or None if the user has said so."""
    if "OMP_NUM_THREADS" in environ:
        return None
    return max(1, count_cores() // local_world(environ, process.world))


def crowds(process: ProcessInfo, environ: Mapping[str, str]) -> bool:
    """Tell whether several processes compute on this machine's CPU."""
    return local_world(environ, process.world) > 1


def _wait_in_turn() -> None:
    """Have this process, once woken, not take the core of whoever wakes it.

    That may be a thread that holds a lock of gloo's, which another thread of gloo's would try again and again until
    then: where no core is idle, as where each process computes on its share of them, for up to half of all CPU time.
    """
    with contextlib.suppress(PermissionError):  # what it would save is all that is lost
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _keep_freed_memory(environ: Mapping[str, str]) -> None:
    """Have glibc keep the host memory that a step frees for the next one, as torch does with a GPU's.

    It would give back each tensor of more than 32 MiB, and map the next one anew, page by page, which takes up to a
    quarter of a step; with this only those over 1 GiB. Not where the user has said how to allocate.
    """
    if any(name.startswith("MALLOC_") for name in environ) or "malloc" in environ.get("GLIBC_TUNABLES", ""):
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library
        choose = ctypes.CDLL(None).mallopt
        if any(choose(_M_MMAP_THRESHOLD, size) for size in _MAPPED_BYTES):  # else the other would map all that is large
            choose(_M_TRIM_THRESHOLD, _ALL)


def prepare(process: ProcessInfo) -> None:
    """Choose the device of this process and how it is used, and its share of the machine's cores."""
    environ = with_slurm(os.environ)
    if process.device.startswith("cuda"):
        os.environ.setdefault(*_IN_HOST_ORDER)
        os.environ.setdefault(*RECORDED)
        if os.environ.keys().isdisjoint(_ALLOCATORS):
            os.environ.setdefault(*_GROWING)
        torch.cuda.set_device(torch.device(process.device))
    else:
        _keep_freed_memory(environ)
        if crowds(process, environ):
            _wait_in_turn()
    threads = threads_for(process, environ)
    if threads is not None:  # beside a GPU, for what an optimizer does on the host
        torch.set_num_threads(threads)


@attrs.frozen
class _Worker:
    """Reports why this process fails, if it is the first to, and ends it."""

    process: ProcessInfo
    fault_store: FaultStore
    terms: Terms
    shows: bool = attrs.field(kw_only=True)
    hosts: bool = attrs.field(kw_only=True)
    once: threading.Lock = attrs.field(factory=threading.Lock, kw_only=True)

    def fail(self, error: BaseException, watch: Watchdog) -> None:
        """Report an error; one that only follows from another rank's end leaves it to processes that know more."""
        progress, rank = self.process.heartbeat, self.process.rank
        follows = is_consequence(error)
        if watch.is_orphan():  # the error follows from that; the watchdog reports it
            time.sleep(_REPORT_SECONDS)
            end(EXIT_FAILED)
        progress.fail(error)
        watch.leaving = not follows
        try:
            until = time.monotonic() + (_CLAIM_SECONDS if follows else 0.0)
            with unlogged():
                while not self.fault_store.is_claimed() and time.monotonic() < until:
                    time.sleep(_LOOK_SECONDS)
                earlier = self.fault_store.first(rank)
            if earlier is not None:
                self.leave(earlier)
            self.report(self._fault(error, follows=follows))
        except RuntimeError:  # the store is gone, and the watchdog ends this process
            time.sleep(_REPORT_SECONDS)
            end(EXIT_FAILED)

    def _fault(self, error: BaseException, *, follows: bool) -> Fault:
        """Return the fault of an error, with where other ranks wait; if ranks no longer answer, they are its cause."""
        fault, everybody = Fault.of(error, self.process.rank), range(self.process.world)
        if not self.process.heartbeat.doing or self.process.world == 1:
            return fault
        statuses = self.fault_store.query(everybody, _ANSWER_SECONDS if follows else _REPORT_SECONDS)
        silent = set(everybody) - statuses.keys()
        if follows and silent:
            text = show_silent(silent, self.fault_store.statuses(silent))
            fault = attrs.evolve(fault, text=text, hangs=True)
        return attrs.evolve(fault, waits=show_waits(statuses))

    def report(self, fault: Fault) -> None:
        """Report a fault that this process was the first to claim, and end.

        It is written before it is published, as others then end this process; a disk that hangs delays it by seconds.
        """
        self.once.acquire()  # another thread that reports ends this one
        if self.shows:
            with contextlib.suppress(OSError):
                sys.stderr.write(f"mimo: {fault.shown}\n")
                sys.stderr.flush()
        if self._may_write():
            report_in_time(self.terms.on_failure, fault)
        with contextlib.suppress(RuntimeError):
            self.fault_store.publish(fault)
        self._record(fault)
        self._end(fault.code)

    def _may_write(self) -> bool:
        """Return whether this run holds its directory; until then another one may."""
        with contextlib.suppress(RuntimeError):  # the store is gone
            return self.fault_store.has_directory()
        return False

    def leave(self, fault: Fault) -> None:
        """End with the exit code of a fault that another rank has published."""
        self.once.acquire()
        self._record(fault)
        self._end(fault.code)

    def _record(self, fault: Fault) -> None:
        """Have what this rank waits for be written, where that says why the run has ended."""
        if fault.hangs and self.terms.on_hang is not None and self._may_write():
            call_in_time(partial(self.terms.on_hang, self.process.rank))

    def _end(self, code: int) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone
            self.fault_store.finish(self.process.rank)
            if self.hosts:
                self.fault_store.wait_for_all(self.process.world)
        end(code)
