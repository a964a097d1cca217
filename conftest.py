"""One helper for every test that needs several processes: fork, run, collect, never leave one behind."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

SECONDS = 120


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


def fork_ranks(world: int, function: Callable[..., object], *args: object) -> list[Any]:
    """Run ``function(rank, *args)`` in ``world`` forked processes that form a gloo group; return their results by rank.

    The parent must not have computed anything with torch. All ranks' tracebacks are shown when one fails, and every
    process is ended before this returns.
    """
    import torch  # noqa: F401  # imported before the fork, so that the children need not

    context = multiprocessing.get_context("fork")
    port = _free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    workers = [
        context.Process(target=_rank, args=(function, rank, world, port, pipes[rank][1], args)) for rank in range(world)
    ]
    found: dict[int, Any] = {}
    errors: dict[int, str] = {}
    try:
        for worker in workers:
            worker.start()
        for _, sender in pipes:
            sender.close()
        open_pipes = {receiver: rank for rank, (receiver, _) in enumerate(pipes)}
        deadline = time.monotonic() + SECONDS
        while open_pipes and not errors and time.monotonic() < deadline:
            for ready in wait(list(open_pipes), timeout=1):
                rank = open_pipes.pop(ready)  # type: ignore[call-overload]
                try:
                    fine, value = pickle.loads(ready.recv_bytes())  # type: ignore[union-attr]  # noqa: S301  # our own child's
                except EOFError:
                    fine, value = False, "ended without a result"
                (found if fine else errors)[rank] = value
        if errors or open_pipes:
            waiting = "".join(f"\nrank {rank}: no result" for rank in open_pipes.values())
            shown = "".join(f"\nrank {rank}:\n{text}" for rank, text in sorted(errors.items()))
            pytest.fail(f"{shown}{waiting}", pytrace=False)
        for worker in workers:
            worker.join(SECONDS)
        return [found[rank] for rank in range(world)]
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.kill()
            worker.join()


@pytest.fixture
def run_ranks() -> Callable[..., list[Any]]:
    """`fork_ranks`, for tests in any package."""
    return fork_ranks
