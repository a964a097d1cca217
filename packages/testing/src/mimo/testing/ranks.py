"""Several processes as ranks of one gloo group: fork, run, collect, never leave one behind.

Each call forks afresh, so that functions may be of any kind, closures too; `pool.Pool` forks from a process that has
computed nothing, and runs functions that can be pickled.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

SECONDS = 280
"""Longest that one call may take."""


class RanksError(AssertionError):
    """What went wrong, on which rank."""


def import_all() -> None:
    """Import what DTensor imports when it is first used: before a fork, so that no child spends seconds on it."""
    import torch._dynamo  # noqa: F401


def _be_rank(
    function: Callable[..., object], rank: int, world: int, listener: socket.socket, results: Connection, args: Any
) -> None:
    """Be one rank in a process of its own: send ``(True, function(rank, *args))``, or False with the traceback."""
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but its types don't say so

    gc.freeze()  # what is there already is nobody's garbage, and no page of it need be copied to find that out
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    try:
        host, port = listener.getsockname()
        if rank == 0:
            store = TCPStore(host, port, world, is_master=True, master_listen_fd=listener.detach())
        else:
            listener.close()  # else nobody would be refused when rank 0 is gone
            store = TCPStore(host, port, world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        # Pickled here: torch would hand tensors over by file descriptors that die with this process.
        results.send_bytes(pickle.dumps((True, function(rank, *args))))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001  # whatever it is, the parent shows it
        results.send_bytes(pickle.dumps((False, traceback.format_exc())))
        results.close()
        os._exit(1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def results_of(answers: Mapping[int, tuple[bool, Any]], world: int) -> list[Any]:
    """Return results by rank.

    Args:
        answers: by rank, whether each succeeded, and its result or what it says; it may lack some.
        world: number of ranks.

    Raises:
        RanksError: not all are results.
    """
    by_rank = dict.fromkeys(range(world), (False, "no result")) | dict(answers)
    wrong = [f"\nrank {rank}:\n{text}" for rank, (fine, text) in sorted(by_rank.items()) if not fine]
    if wrong:
        raise RanksError("".join(wrong))
    return [by_rank[rank][1] for rank in range(world)]


def _collect(
    receivers: Sequence[Connection], workers: Sequence[BaseProcess], stop: Sequence[Connection]
) -> dict[int, tuple[bool, Any]]:
    """Return answers by rank, with what came until all had spoken, or one had failed and the rest waited."""
    answers: dict[int, tuple[bool, Any]] = {}
    open_pipes = dict(enumerate(receivers))
    deadline = time.monotonic() + SECONDS
    while open_pipes and time.monotonic() < deadline:
        some = wait([*open_pipes.values(), *stop], timeout=1)
        if any(pipe in some for pipe in stop) or (not some and not all(fine for fine, _ in answers.values())):
            break  # nobody asks any more, or the others wait for the failed one in vain
        for rank, receiver in list(open_pipes.items()):
            if receiver in some:
                del open_pipes[rank]
                try:
                    answers[rank] = pickle.loads(receiver.recv_bytes())  # noqa: S301  # from our own child
                except EOFError:
                    workers[rank].join()
                    answers[rank] = (False, f"ended without a result, exit code {workers[rank].exitcode}")
    return answers


def answers_of(
    world: int, function: Callable[..., object], args: Sequence[object], *, stop: Sequence[Connection] = ()
) -> dict[int, tuple[bool, Any]]:
    """Run ``function(rank, *args)`` in ``world`` forked processes that form a gloo group; every one ends before this.

    Args:
        world: number of processes.
        function: what each runs.
        args: what it is given beside its rank.
        stop: ends all, as soon as one of these has something to be read.

    Returns:
        By rank, whether each succeeded, and its result or the traceback; it lacks those that waited in vain.
    """
    context = multiprocessing.get_context("fork")
    # It listens from now on: a port that is only looked up may be another process's when rank 0 comes to it.
    listener = socket.create_server(("127.0.0.1", 0), backlog=world)
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    workers = [
        context.Process(
            target=_be_rank, args=(function, rank, world, listener, pipes[rank][1], args), name=f"rank {rank}"
        )
        for rank in range(world)
    ]
    try:
        for worker in workers:
            worker.start()
        listener.close()
        for _, sender in pipes:
            sender.close()
        answers = _collect([receiver for receiver, _ in pipes], workers, stop)
        if len(answers) == world and all(fine for fine, _ in answers.values()):
            for worker in workers:
                worker.join(SECONDS)
        return answers
    finally:
        listener.close()
        for receiver, _ in pipes:
            receiver.close()
        for worker in workers:
            if worker.is_alive():
                worker.kill()
            worker.join()


def fork_ranks(world: int, function: Callable[..., object], *args: object) -> list[Any]:
    """Run ``function(rank, *args)`` in ``world`` forked processes that form a gloo group; return their results by rank.

    The parent must not have computed anything with torch on several threads. Every process is ended before this
    returns.

    Raises:
        RanksError: with the traceback of every rank that failed.
    """
    import_all()
    return results_of(answers_of(world, function, args), world)
