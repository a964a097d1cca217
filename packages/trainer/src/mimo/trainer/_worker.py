"""What one process of a run does around its task: join the others, watch for their faults, tell its own."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from mimo.trainer._fault import EXIT_FAILED, Fault, FaultBoard
from mimo.trainer._place import Place, local_world

Task: TypeAlias = Callable[[Place], None]
Connect: TypeAlias = Callable[[], Store]

_WATCH_SECONDS = 0.2


class Watch(threading.Thread):
    """Ends this process when another one has failed, or when the store is gone and with it whoever hosts it.

    A thread, since the main one may be inside a collective that never returns.
    """

    def __init__(self, board: FaultBoard) -> None:
        super().__init__(name="mimo-watch", daemon=True)
        self._board = board
        self._done = threading.Event()

    def run(self) -> None:
        """Look at the board until `stop`."""
        while not self._done.wait(_WATCH_SECONDS):
            try:
                fault = self._board.read()
            except RuntimeError:  # all errors of stores are
                if not self._done.is_set():
                    _end(EXIT_FAILED)
                return
            if fault is not None and not self._done.is_set():
                _end(fault.code)

    def stop(self) -> None:
        """Stop looking; returns when the thread has ended."""
        self._done.set()
        self.join()


def run_task(
    task: Task, place: Place, connect: Connect, *, directory: Path | None, shows: bool, hosts: bool = False
) -> None:
    """Run a task as one rank, its process group initialised; ends the process if it fails.

    Args:
        task: what to run.
        place: this process.
        connect: opens a new client of the store that all ranks share.
        directory: run directory, for the reason of a failure.
        shows: whether this process is the one to show its own error.
        hosts: whether the store lives in this process, which then must outlive the others.
    """
    board = FaultBoard(connect())
    watch = Watch(board)
    watch.start()
    try:
        _prepare(place)
        backend = "cpu:gloo,cuda:nccl" if place.device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, store=connect(), rank=place.rank, world_size=place.world)
        task(place)
        dist.destroy_process_group()
    except BaseException as error:  # noqa: BLE001 -- whatever it is, the other ranks must end too
        _fail(Fault.of(error, place.rank), board, directory, shows=shows)
    board.finish(place.world if hosts else None)
    watch.stop()


def threads_for(place: Place, environ: Mapping[str, str]) -> int | None:
    """Return how many threads a process on CPU should use, or None if the user has said so."""
    if "OMP_NUM_THREADS" in environ:
        return None
    return max(1, len(os.sched_getaffinity(0)) // local_world(environ, place.world))


def _prepare(place: Place) -> None:
    if place.device.startswith("cuda"):
        torch.cuda.set_device(torch.device(place.device))
        return
    threads = threads_for(place, os.environ)
    if threads is not None:
        torch.set_num_threads(threads)


def _fail(fault: Fault, board: FaultBoard, directory: Path | None, *, shows: bool) -> None:
    """Tell why, if this rank is the first to fail, and end. Told is before published: then the others end us."""
    try:
        if board.claim(fault.rank):
            fault.write(directory)
            if shows:
                sys.stderr.write(f"mimo: {fault.text}\n")
            board.publish(fault)
        else:
            fault = board.wait()
    except (RuntimeError, OSError):  # the store is gone, or the disk full: nobody left to tell
        _end(EXIT_FAILED)
    _end(fault.code)


def _end(code: int) -> None:
    """End at once: other threads may hang in collectives, so nothing may be waited for."""
    for stream in (sys.stdout, sys.stderr):
        if threading.current_thread() is threading.main_thread():
            stream.flush()
    os._exit(code)
