"""Starting the processes of a run on this machine, or joining those that torchrun or Slurm started.

On CPU the processes are forked from this one, which has imported torch and computed nothing: that takes a fraction
of a second where fresh interpreters take ten. GPUs want fresh ones, which get their task pickled.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import connection, resource_tracker
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Literal, TypeAlias

import attrs
import torch

from mimo.hooks import ConfigError
from mimo.trainer._diagnosis import show_waits
from mimo.trainer._fault import Fault, FaultBoard, write_in_time
from mimo.trainer._place import Place, is_joining, local_world, place_in, with_slurm
from mimo.trainer._stores import connect, host_store
from mimo.trainer._watch import SAME_SECONDS, Terms
from mimo.trainer._worker import Task, run_task

Device: TypeAlias = Literal["cpu", "cuda"]
StartMethod: TypeAlias = Literal["fork", "spawn"]

_HOST = "127.0.0.1"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_GRACE_SECONDS = 5.0
_ANSWER_SECONDS = 3.0
_LOOK_SECONDS = 1.0
_STOPPING = "mimo: asked to stop: the step is finished and saved. A second signal ends all at once.\n"


class _InterruptedError(BaseException):
    """Ctrl-C or SIGTERM reached the launcher, or nobody reads what a rank writes."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def choose_device(device: str, world: int) -> Device:
    """Return where the processes of this machine compute.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``; auto takes GPUs if there is one for each process.
        world: number of processes.

    Raises:
        ConfigError: GPUs are asked for and there are too few.
    """
    if device == "cpu":
        return "cpu"
    here = local_world(with_slurm(os.environ), world)
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found >= here:
        return "cuda"
    if device == "auto":
        return "cpu"
    raise ConfigError(
        "run.device",
        expected=f"{here} GPUs, one for each process on this machine",
        got=f"{found} GPUs",
        fix="Set it to cpu, or use fewer ranks.",
    )


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
) -> int:
    """Run a task in every rank, and return the exit code: that of the first rank to fail.

    Args:
        task: called in each process with its `Place`, the process group initialised; to be spawned it must be
            picklable.
        world: number of processes.
        device: what each process computes on.
        method: how processes are started on this machine, see `start_method`.
        terms: under which the task runs.
    """
    environ, terms = with_slurm(os.environ), terms or Terms()
    if is_joining(environ):
        _join(task, place_in(environ, device), environ, terms)
        return 0
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((_HOST, 0), backlog=max(world, 16)))
        processes = _processes(task, world, device, method, listener, terms)
        try:
            with _interruptible(processes, terms) as asked:
                # Lives as long as this process; its threads begin after the forks.
                store = host_store(_HOST, listener.getsockname()[1], listener)
                fault = _outcome(processes, FaultBoard(store), asked)
        except _InterruptedError as interrupt:
            if interrupt.number != signal.SIGPIPE:
                sys.stderr.write("mimo: interrupted\n")
            return 128 + interrupt.number
    if fault is None:
        return 0
    sys.stderr.write(f"mimo: {fault.shown}\n")
    sys.stderr.flush()
    write_in_time(partial(fault.write, terms.directory))
    return fault.code


def _join(task: Task, place: Place, environ: Mapping[str, str], terms: Terms) -> None:
    """Run the task as the one rank that this process is."""
    for number in _SIGNALS:  # whoever started this process ends it; nothing is to be cleaned up
        signal.signal(number, signal.SIG_DFL)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in environ:
            raise ConfigError(
                f"environment variable {name}", expected="where rank 0 is to be met", got="nothing", fix="Set it."
            )
    host, port = environ["MASTER_ADDR"], environ["MASTER_PORT"]
    if not port.isdecimal():
        raise ConfigError("environment variable MASTER_PORT", expected="a whole number", got=repr(port))
    hosts = place.rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    # Kept until the end. An attempt after a restart must not see what the last one left in a store that outlives it.
    server = host_store(host, int(port)) if hosts else None
    prefix = f"attempt_{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    run_task(task, place, partial(connect, host, int(port), prefix), terms=terms, shows=True, hosts=server is not None)


def _processes(
    task: Task, world: int, device: Device, method: StartMethod, listener: socket.socket, terms: Terms
) -> Sequence[BaseProcess]:
    context: ForkContext | SpawnContext
    if method == "spawn":
        context = multiprocessing.get_context("spawn")
        # It unblocks signals when it starts, which the first process would otherwise make it do.
        resource_tracker.ensure_running()
    else:
        context = multiprocessing.get_context("fork")
        # Half a second that every rank would otherwise spend by itself: torch loads it when an optimizer is first made.
        importlib.import_module("torch._dynamo")
    port = listener.getsockname()[1]
    forked = listener if method == "fork" else None
    return [
        context.Process(
            target=_main,
            args=(
                task,
                Place(rank=rank, world=world, local_rank=rank, device=f"cuda:{rank}" if device == "cuda" else device),
                port,
                terms,
                forked,
            ),
            name=f"rank {rank}",
        )
        for rank in range(world)
    ]


def _main(task: Task, place: Place, port: int, terms: Terms, inherited: socket.socket | None) -> None:
    """Be one rank that `launch` started; signals are blocked until it is known what they mean here."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the launcher ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if inherited is not None:
        inherited.close()  # so that the port dies with the launcher
    run_task(task, place, partial(connect, _HOST, port), terms=terms, shows=False)


@attrs.define
class _Asked:
    """Whether, and when, all ranks were asked to save and end."""

    timeout: float
    at: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether they have taken too long."""
        return self.at is not None and time.monotonic() > self.at + self.timeout


@contextlib.contextmanager
def _interruptible(processes: Sequence[BaseProcess], terms: Terms) -> Iterator[_Asked]:
    """Start processes, and end all that are left when the block is left, by a signal too.

    A first SIGTERM is passed on to those that know what it means; they then have as long as a run may stand still.
    """
    asked = _Asked(timeout=terms.timeout)

    def interrupt(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGTERM and terms.stops:
            if asked.at is None:
                asked.at = time.monotonic()
                for process in processes:
                    process.terminate()
                os.write(sys.stderr.fileno(), _STOPPING.encode())
                return
            if time.monotonic() < asked.at + SAME_SECONDS:
                return
        raise _InterruptedError(number)

    # Blocked while starting, so that no child ever runs our handler, nor shows a traceback of its imports.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    before = {number: signal.signal(number, interrupt) for number in _SIGNALS}
    try:
        try:
            for process in processes:
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        yield asked
    finally:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not leave anybody behind
        _end_all([process for process in processes if process.pid is not None])
        for number, handler in before.items():
            signal.signal(number, handler)


def _outcome(processes: Sequence[BaseProcess], board: FaultBoard, asked: _Asked) -> Fault | None:
    """Wait for all ranks and return what made them fail, or None. Once one has failed, the others get a moment."""
    waiting = {process.sentinel: rank for rank, process in enumerate(processes)}
    failed = False
    while waiting:
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
                if board.read() is None and board.claim(rank):  # it had no time to say why
                    marks = board.answers(list(waiting.values()), _ANSWER_SECONDS)
                    board.publish(attrs.evolve(Fault.of_exit(rank, code), waits=show_waits(marks)))
    return _cause(processes, board) if failed else None


def _cause(processes: Sequence[BaseProcess], board: FaultBoard) -> Fault:
    """Return the first cause: a rank that was killed makes others fail, and they may be the first to tell."""
    told = board.read()
    if told is not None and told.explained:
        return told
    codes = [(process.exitcode or 0, rank) for rank, process in enumerate(processes)]
    # Signals are negative; a claim without a reason means that the rank died between the two.
    for code, rank in sorted(codes):
        if code < 0 or (code and told is None):
            return attrs.evolve(Fault.of_exit(rank, code), waits="" if told is None else told.waits)
    assert told is not None, codes
    return told


def _end_all(processes: Sequence[BaseProcess]) -> None:
    """End every process; none has anything to clean up, and one may be stopped."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
