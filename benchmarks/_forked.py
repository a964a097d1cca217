"""Functions in several forked ranks of one gloo group, one thread each."""

from __future__ import annotations

import gc
import multiprocessing
import socket
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but its types don't say so

from mimo.launch import ProcessInfo
from mimo.launch.start.worker import prepare

T = TypeVar("T")


def of_each_rank(function: Callable[[int], T], *, world: int) -> list[T]:
    """Return what ``function(rank)`` returns in each of ``world`` ranks; ends the program where one fails."""
    context = multiprocessing.get_context("fork")
    # It listens from now on: a port that is only looked up may be another process's when rank 0 comes to it.
    listener = socket.create_server(("127.0.0.1", 0), backlog=world)
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    workers = [
        context.Process(target=_be_rank, args=(function, rank, world, listener, pipes[rank][1]))
        for rank in range(world)
    ]
    for worker in workers:
        worker.start()
    listener.close()
    for _, sender in pipes:
        sender.close()
    try:
        found = [receiver.recv() for receiver, _ in pipes]  # before joining: a sender waits for whoever reads
    except EOFError:
        sys.exit("a rank failed")
    for worker in workers:
        worker.join()
        if worker.exitcode:
            sys.exit("a rank failed")
    return found


def in_ranks(measure: Callable[[int, int], T], *, world: int, rounds: int) -> T:
    """Return what rank 0 found by ``measure(rank, rounds)``; ends the program where a rank fails."""

    def of_the_first(rank: int) -> T | None:
        found = measure(rank, rounds)
        return None if rank else found

    return cast("T", of_each_rank(of_the_first, world=world)[0])


def _be_rank(
    function: Callable[[int], Any], rank: int, world: int, listener: socket.socket, result: Connection
) -> None:
    prepare(ProcessInfo(rank=rank, world=world, local_rank=rank))  # as `mimo train` does
    torch.set_num_threads(1)
    gc.collect()  # likewise: what was imported is nobody's garbage
    gc.freeze()
    host, port = listener.getsockname()
    if rank == 0:
        store = TCPStore(host, port, world, is_master=True, master_listen_fd=listener.detach())
    else:
        listener.close()
        store = TCPStore(host, port, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    result.send(function(rank))
    dist.barrier()
    dist.destroy_process_group()
