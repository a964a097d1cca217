"""Starting the processes of a run on this machine, or joining those that torchrun or Slurm started.

On CPU the processes are forked from this one, which has imported torch and computed nothing: that takes a fraction
of a second where fresh interpreters take ten. GPUs want fresh ones, which get their task pickled.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Literal, TypeAlias

import attrs
from torch.distributed.distributed_c10d import Store

from mimo.hooks import ConfigError
from mimo.launch.faults.fault import Fault, FaultStore, report_in_time
from mimo.launch.faults.hang_report import show_waits
from mimo.launch.faults.store import connect, host_store
from mimo.launch.faults.watchdog import SAME_SECONDS, START_SECONDS, Terms, stop_signals
from mimo.launch.process.gpus import Device, find_gpus
from mimo.launch.process.host_memory import HostMemory
from mimo.launch.process.process_info import ProcessInfo, is_joining, process_from, with_slurm
from mimo.launch.start.rendezvous import Rendezvous
from mimo.launch.start.worker import Task, run_task

StartMethod: TypeAlias = Literal["fork", "spawn"]

_USUAL = Rendezvous()
_HOST = "127.0.0.1"
_LOOPBACK_INDEX = 1
"""Of the interface that leads back to this machine, in every network namespace."""
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_FILES, _FILES_OF_A_RANK = 10, 5
"""What the launcher opens for the store and, for each rank, of pipes and connections."""
_CONNECT_SECONDS = 10.0
_GRACE_SECONDS = 5.0
_ANSWER_SECONDS = 3.0
_LOOK_SECONDS = 1.0
_STOPPING = "mimo: asked to stop: the step is finished and saved. A second signal ends all at once.\n"


class _InterruptedError(BaseException):
    """Ctrl-C or SIGTERM reached the launcher, or the reader of a rank's output has closed it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def start_method(device: Device) -> StartMethod:
    """Return how processes that compute on ``device`` are started."""
    return "fork" if device == "cpu" else "spawn"


def launch(
    task: Task,
    *,
    world: int,
    device: Device = "cpu",
    method: StartMethod = "fork",
    terms: Terms | None = None,
    rendezvous: Rendezvous = _USUAL,
) -> int:
    """Run a task in every rank, and return the exit code: that of the first rank to fail.

    Args:
        task: called in each process with its `ProcessInfo`, the process group initialised; to be spawned it must be
            picklable.
        world: number of processes.
        device: what each process computes on.
        method: how processes are started on this machine, see `start_method`.
        terms: how it is watched, and what is called when it starts and fails.
        rendezvous: devices and backend of the processes.
    """
    environ, terms = with_slurm(os.environ), terms or Terms()
    if is_joining(environ):
        gpus = find_gpus().visible if device == "cuda" else 0
        _join(task, process_from(environ, device, gpus=gpus), environ, terms)
        return 0
    check_open_files(world)
    with contextlib.ExitStack() as stack:
        alive = [stack.enter_context(side) for side in connection.Pipe(duplex=False)]
        listener = stack.enter_context(socket.create_server((_HOST, 0), backlog=max(world, 16)))
        processes = _processes(task, world, device, method, terms, alive[0], (listener, alive[1]), rendezvous)
        try:
            with _interruptible(processes, terms) as asked:
                # Lives as long as this process; its threads begin after the forks.
                store = host_store(_HOST, listener.getsockname()[1], listener, seconds=_seconds(terms))
                fault = _outcome(processes, FaultStore(store), asked)
        except _InterruptedError as interrupt:
            if interrupt.number != signal.SIGPIPE:
                _say("mimo: interrupted\n")
            return 128 + interrupt.number
    if fault is None:
        return 0
    _say(f"mimo: {fault.shown}\n")
    report_in_time(terms.on_failure, fault)
    return fault.code


def check_open_files(world: int) -> None:
    """Refuse to start more ranks than this process can be connected to.

    Raises:
        ConfigError: naming the limit.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needs = sum(1 for _ in Path("/proc/self/fd").iterdir()) + _FILES + _FILES_OF_A_RANK * world
    if limit != resource.RLIM_INFINITY and limit < needs:
        raise ConfigError(
            "ulimit -n",
            expected=f"at least {needs} open files, to start {world} processes",
            got=str(limit),
            fix=f"Raise it before the command: ulimit -n {max(1024, 2 * needs)}.",
        )


def _join(task: Task, process: ProcessInfo, environ: Mapping[str, str], terms: Terms) -> None:
    """Run the task as the one rank that this process is."""
    for number in (signal.SIGINT, *stop_signals()):  # whoever started this process ends it; nothing is to be cleaned up
        signal.signal(number, signal.SIG_DFL)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in environ:
            raise ConfigError(
                f"environment variable {name}", expected="where rank 0 is to be met", got="nothing", fix="Set it."
            )
    host, port = environ["MASTER_ADDR"], environ["MASTER_PORT"]
    if not port.isdecimal():
        raise ConfigError("environment variable MASTER_PORT", expected="a whole number", got=repr(port))
    hosts = process.rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    server = _serve(host, port) if hosts else None  # it lives until the end
    client = partial(connect, host, int(port), seconds=max(terms.timeout, START_SECONDS))
    meet = partial(client, name_run(client(_prefix(environ)), process.rank, environ))
    run_task(task, process, meet, terms=terms, shows=True, hosts=server is not None)


def name_run(store: Store, rank: int, environ: Mapping[str, str]) -> str:
    """Return what names of this run begin with: it must not read what another one left in a store that outlives it.

    The store of torchrun's agent serves all runs that a program joins, one after another. Each rank counts its own.

    Args:
        store: a client that all runs of this attempt share.
        rank: this process.
        environ: of this process.
    """
    return f"{_prefix(environ)}_run_{store.add(f'runs.{rank}', 1)}"


def _prefix(environ: Mapping[str, str]) -> str:
    """Return what names of one attempt begin with, by the restarts that torchrun counts, or Slurm."""
    return f"attempt_{environ.get('TORCHELASTIC_RESTART_COUNT', environ.get('SLURM_RESTART_COUNT', '0'))}"


def _serve(host: str, port: str) -> Store:
    """Serve the store that all ranks share.

    Raises:
        ConfigError: somebody else listens on its port.
    """
    try:
        return host_store(host, int(port))
    except RuntimeError as error:  # all errors of stores are
        if "EADDRINUSE" not in str(error):
            raise
        raise ConfigError(
            "environment variable MASTER_PORT",
            expected="a port that is free on the machine of rank 0",
            got=f"{port}, which is in use",
            fix="Set another one, the same for all ranks.",
        ) from error


def _processes(
    task: Task,
    world: int,
    device: Device,
    method: StartMethod,
    terms: Terms,
    alive: Connection,
    launchers: tuple[socket.socket, Connection],
    rendezvous: Rendezvous = _USUAL,
) -> Sequence[BaseProcess]:
    """Return the processes of all ranks, not yet started.

    Args:
        task: what they run.
        world: how many there are.
        device: what each computes on.
        method: how they are started.
        terms: under which they run.
        alive: becomes readable when this process is gone.
        launchers: the socket of the store and the other end of ``alive``, which belong to this process alone.
        rendezvous: their devices and backend.
    """
    context: ForkContext | SpawnContext
    if method == "spawn":
        context = multiprocessing.get_context("spawn")
        # It unblocks signals when it starts, which the first process would otherwise make it do.
        resource_tracker.ensure_running()
    else:
        context = multiprocessing.get_context("fork")
        # Half a second that every rank would otherwise spend by itself: torch loads it when an optimizer is first made.
        importlib.import_module("torch._dynamo")
    port = launchers[0].getsockname()[1]
    forked = launchers if method == "fork" else ()
    return [
        context.Process(
            target=_main,
            args=(
                task,
                ProcessInfo(rank=rank, world=world, local_rank=rank, device=rendezvous.device(device, rank)),
                port,
                terms if rank == 0 or method == "fork" else attrs.evolve(terms, lock=None),
                alive,
                rendezvous,
                forked,
            ),
            name=f"rank {rank}",
        )
        for rank in range(world)
    ]


def _main(
    task: Task,
    process: ProcessInfo,
    port: int,
    terms: Terms,
    alive: Connection,
    rendezvous: Rendezvous,
    inherited: Sequence[socket.socket | Connection],
) -> None:
    """Run one rank that `launch` started; signals are blocked until their handlers are set."""
    for number in (signal.SIGINT, signal.SIGHUP):  # the terminal sends them to all; the launcher ends us
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for one in inherited:  # so that they die with the launcher
        one.close()
    if terms.lock is not None:
        if process.rank == 0:
            terms.lock.keep()
        else:
            terms.lock.close()
    # All ranks are on this machine; without this, gloo listens on the address that the host's name resolves to.
    os.environ.update(dict.fromkeys(_INTERFACES, socket.if_indextoname(_LOOPBACK_INDEX)))
    meet = partial(connect, _HOST, port, seconds=_seconds(terms))
    run_task(task, process, meet, terms=terms, shows=False, launcher=alive, rendezvous=rendezvous)


@attrs.define
class _Asked:
    """Whether and when all ranks were asked to save and end."""

    timeout: float
    at: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether they have taken too long."""
        return self.at is not None and time.monotonic() > self.at + self.timeout


@contextlib.contextmanager
def _interruptible(processes: Sequence[BaseProcess], terms: Terms) -> Iterator[_Asked]:
    """Start processes, and end all that are left when the block is left, by a signal too.

    A first SIGTERM or SIGHUP is passed on to processes whose terms handle it; they then have ``terms.timeout`` to end.
    """
    asked, stops = _Asked(timeout=terms.timeout), stop_signals()
    signals = (signal.SIGINT, *stops)

    def interrupt(number: int, _frame: FrameType | None) -> None:
        if number in stops and terms.stops:
            if asked.at is None:
                asked.at = time.monotonic()
                for process in processes:
                    process.terminate()
                with contextlib.suppress(OSError):  # as where a terminal is gone
                    os.write(sys.stderr.fileno(), _STOPPING.encode())
                return
            if number != signal.SIGTERM or time.monotonic() < asked.at + SAME_SECONDS:
                return  # a terminal that goes may send several SIGHUPs
        raise _InterruptedError(number)

    # Blocked while starting, so that no child ever runs our handler, nor shows a traceback of its imports.
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    before = {number: signal.signal(number, interrupt) for number in signals}
    try:
        try:
            for process in processes:
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        yield asked
    finally:
        for number in signals:
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not leave anybody behind
        _end_all([process for process in processes if process.pid is not None])
        for number, handler in before.items():
            signal.signal(number, handler)


def _outcome(processes: Sequence[BaseProcess], fault_store: FaultStore, asked: _Asked) -> Fault | None:
    """Wait for all ranks and return what made them fail, or None. Once one has failed, the others get a moment."""
    waiting = {process.sentinel: rank for rank, process in enumerate(processes)}
    pids, memory = [process.pid or 0 for process in processes], HostMemory()
    failed = False
    while waiting:
        memory.look(pids)
        ready = connection.wait(list(waiting), timeout=_GRACE_SECONDS if failed else _LOOK_SECONDS)
        if not ready:
            if failed:
                break
            if asked.is_over:
                raise _InterruptedError(signal.SIGTERM)
            continue
        for rank in [waiting.pop(sentinel) for sentinel in list(waiting) if sentinel in ready]:
            processes[rank].join()
            code = processes[rank].exitcode
            if code == -signal.SIGPIPE:
                raise _InterruptedError(signal.SIGPIPE)
            if code and not failed:
                failed = True
                if fault_store.read() is None and fault_store.claim(rank):  # it had no time to publish why
                    statuses = fault_store.query(list(waiting.values()), _ANSWER_SECONDS)
                    fault = Fault.of_exit(rank, code, memory.explain(pids[rank], code))
                    fault_store.publish(attrs.evolve(fault, waits=show_waits(statuses)))
    return _cause(processes, fault_store, memory) if failed else None


def _cause(processes: Sequence[BaseProcess], fault_store: FaultStore, memory: HostMemory) -> Fault:
    """Return the first cause: a rank that was killed makes others fail, and they may be the first to report."""
    published = fault_store.read()
    if published is not None and published.explained:
        return published
    codes = [(process.exitcode or 0, rank) for rank, process in enumerate(processes)]
    # Signals are negative; a claim without a reason means that the rank died between the two.
    for code, rank in sorted(codes):
        if code < 0 or (code and published is None):
            fault = Fault.of_exit(rank, code, memory.explain(processes[rank].pid or 0, code))
            return attrs.evolve(fault, waits="" if published is None else published.waits)
    assert published is not None, codes
    return published


def _seconds(terms: Terms) -> float:
    """Return how long a process may take to connect to the store on its own machine."""
    return max(terms.timeout, _CONNECT_SECONDS)


def _say(text: str) -> None:
    """Write to standard error; a terminal that is gone is no error."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def _end_all(processes: Sequence[BaseProcess]) -> None:
    """Kill every process: none has anything to clean up, and one may be stopped."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
