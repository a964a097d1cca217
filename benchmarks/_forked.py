"""A measurement in several forked ranks of one gloo group, one thread each."""

from __future__ import annotations

import multiprocessing
import socket
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def _rank(measure: Callable[[int, int], T], rank: int, world: int, port: int, rounds: int, result: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    found = measure(rank, rounds)
    if rank == 0:
        result.send(found)
    dist.barrier()
    dist.destroy_process_group()


def in_ranks(measure: Callable[[int, int], T], *, world: int, rounds: int) -> T:
    """Return what rank 0 found by ``measure(rank, rounds)``; ends the program where a rank fails."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    receiver, sender = context.Pipe(duplex=False)
    workers = [
        context.Process(target=_rank, args=(measure, rank, world, port, rounds, sender)) for rank in range(world)
    ]
    for worker in workers:
        worker.start()
    sender.close()
    try:
        found: T = receiver.recv()  # before joining: a sender waits for whoever reads
    except EOFError:
        sys.exit("no rank has found anything")
    for worker in workers:
        worker.join()
        if worker.exitcode:
            sys.exit("a rank failed")
    return found
