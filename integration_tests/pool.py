"""A pool of forked workers, started once, which serves every run of functions that can be pickled.

A process that has been a rank can't be one of another group: DTensor keeps what it worked out by mesh, and with it the
names of groups that are gone, which new groups get again. So a worker computes nothing itself: it stays as it was
forked, and forks a child to be its rank in each run.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self

from ranks import SECONDS, be_rank, free_port, import_all, results_of

_ENDS_SECONDS = 5
_FORK = multiprocessing.get_context("fork")


def _child(worker: Connection, task: bytes, rank: int, world: int, port: int, results: Connection) -> None:
    """Be one rank of one run."""
    worker.close()  # so that it tells of the worker's end, and not of ours
    threading.Thread(target=_end_with_parent, daemon=True).start()
    function, args = pickle.loads(task)  # noqa: S301  # from our own parent
    be_rank(function, rank, world, port, results, args)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(rank: int, parent: Connection, others: Sequence[Connection]) -> None:
    """Do one run after the other, until the parent closes its end; each is answered once, when its child has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the parent ends us
    for other in others:
        other.close()  # the parent's ends, which were forked with us
    try:
        while True:
            request = parent.recv()
            if request is not None:  # else it was to stop what had ended by itself
                parent.send_bytes(_run(rank, parent, *request))
    except (EOFError, ConnectionError):  # the parent has closed its end
        return


def _run(rank: int, parent: Connection, task: bytes, world: int, port: int) -> bytes:
    """Fork a child, and return its answer once it has ended, or been ended because the parent says so or is gone."""
    receiver, sender = _FORK.Pipe(duplex=False)
    child = _FORK.Process(target=_child, args=(parent, task, rank, world, port, sender))
    child.start()
    sender.close()
    answer = None
    try:
        if receiver in wait([receiver, parent]):
            answer = receiver.recv_bytes()
        wait([child.sentinel, parent])
    except EOFError:
        child.join()
        answer = pickle.dumps((False, f"ended without a result, exit code {child.exitcode}"))
    finally:
        receiver.close()
        child.kill()
        child.join()
    if parent.poll():
        parent.recv()
    return answer or pickle.dumps((False, "no result"))


class Pool:
    """Runs functions in several processes that form a gloo group, as `ranks.fork_ranks` does.

    Make it in a process that has imported torch and computed nothing. It may compute afterwards.

    Args:
        size: the most ranks of a run.
    """

    def __init__(self, size: int = 8) -> None:
        self._size = size
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._start()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        """End all workers."""
        self.close()

    def run(self, world: int, function: Callable[..., object], *args: object) -> list[Any]:
        """Run ``function(rank, *args)`` in ``world`` processes that form a gloo group; return their results by rank.

        Args:
            world: number of processes, at most the pool's size.
            function: of a module, so that it can be pickled by its name.
            args: picklable too.

        Raises:
            RanksError: with the traceback of every rank that failed. The others have been ended.
        """
        assert world <= self._size, f"{world} ranks of a pool of {self._size}"
        task = pickle.dumps((function, args))
        if not self._workers:
            self._start()
        port = free_port()
        answers: dict[int, tuple[bool, Any]] = {}
        try:
            for _, pipe in self._workers[:world]:
                pipe.send((task, world, port))
            self._collect({rank: pipe for rank, (_, pipe) in enumerate(self._workers[:world])}, answers)
        except BaseException:
            self.close()
            raise
        if any(not process.is_alive() for process, _ in self._workers):
            self.close()  # and start anew with the next run
        return results_of(answers, world)

    def close(self) -> None:
        """End all workers and what they run."""
        for _, pipe in self._workers:
            pipe.close()
        for process, _ in self._workers:
            process.join(_ENDS_SECONDS)
            process.kill()
            process.join()
        self._workers.clear()

    def _start(self) -> None:
        import_all()
        for rank in range(self._size):
            ours, theirs = _FORK.Pipe()
            process = _FORK.Process(
                target=_work, args=(rank, theirs, [ours, *(pipe for _, pipe in self._workers)]), name=f"worker {rank}"
            )
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    @staticmethod
    def _collect(waiting: dict[int, Connection], answers: dict[int, tuple[bool, Any]]) -> None:
        """Take an answer of each rank; stop those that wait in vain for one that failed, or that take too long."""
        deadline, stopped = time.monotonic() + SECONDS, False
        while waiting:
            ready = wait(list(waiting.values()), timeout=1)
            failed = any(not fine for fine, _ in answers.values())
            if not stopped and ((failed and not ready) or time.monotonic() > deadline):
                stopped = True
                for pipe in waiting.values():
                    pipe.send(None)
            for rank, pipe in list(waiting.items()):
                if pipe in ready:
                    del waiting[rank]
                    try:
                        answers[rank] = pickle.loads(pipe.recv_bytes())  # noqa: S301  # from our own child
                    except (EOFError, ConnectionError):
                        answers[rank] = (False, "its worker is gone")
