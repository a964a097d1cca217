"""Several processes as ranks of one gloo group: fork, run, collect, never leave one behind.

Each call forks afresh, which takes 0.2 seconds for eight. Processes are not used again for another group: DTensor keeps
meshes by their shape, and with them the names of groups that are gone.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

SECONDS = 180
"""Longest that one call may take."""


class RanksError(AssertionError):
    """What went wrong, on which rank."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank(function: Callable[..., object], rank: int, world: int, port: int, results: Connection, args: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
        # Pickled here: torch would hand tensors over by file descriptors that die with this process.
        results.send_bytes(pickle.dumps((True, function(rank, *args))))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001  # whatever it is, the parent shows it
        results.send_bytes(pickle.dumps((False, traceback.format_exc())))
        results.close()
        os._exit(1)


def _collect(receivers: Sequence[Connection]) -> tuple[dict[int, Any], dict[int, str]]:
    """Return results and errors by rank, with what came until all had spoken, or one had failed and the rest waited."""
    found: dict[int, Any] = {}
    errors: dict[int, str] = {}
    open_pipes = dict(enumerate(receivers))
    deadline = time.monotonic() + SECONDS
    while open_pipes and time.monotonic() < deadline:
        some = wait(list(open_pipes.values()), timeout=1)
        if errors and not some:
            break  # the others wait for the failed one in vain
        for rank, receiver in list(open_pipes.items()):
            if receiver in some:
                del open_pipes[rank]
                try:
                    fine, value = pickle.loads(receiver.recv_bytes())  # noqa: S301  # from our own child
                except EOFError:
                    fine, value = False, "ended without a result"
                (found if fine else errors)[rank] = value
    return found, errors


def fork_ranks(world: int, function: Callable[..., object], *args: object) -> list[Any]:
    """Run ``function(rank, *args)`` in ``world`` forked processes that form a gloo group; return their results by rank.

    The parent must not have computed anything with torch on several threads. Every process is ended before this
    returns.

    Raises:
        RanksError: with the traceback of every rank that failed.
    """
    import torch._dynamo  # noqa: F401  # which DTensor imports: before the fork, so that no child spends seconds on it

    context = multiprocessing.get_context("fork")
    port = _free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    workers = [
        context.Process(target=_rank, args=(function, rank, world, port, pipes[rank][1], args)) for rank in range(world)
    ]
    try:
        for worker in workers:
            worker.start()
        for _, sender in pipes:
            sender.close()
        found, errors = _collect([receiver for receiver, _ in pipes])
        if len(found) < world:
            told = {rank: "no result" for rank in range(world) if rank not in found} | errors
            raise RanksError("".join(f"\nrank {rank}:\n{text}" for rank, text in sorted(told.items())))
        for worker in workers:
            worker.join(SECONDS)
        return [found[rank] for rank in range(world)]
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.kill()
            worker.join()
