"""Running a check in forked processes that form a gloo group, so that nothing it does outlives it."""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist


def run_ranks(world: int, function: Callable[[], str | None], *, seconds: float) -> list[str | None]:
    """Run ``function()`` in ``world`` processes, each a rank of the default group; return what each said.

    An error of a rank is what it says, with its traceback. Every process has ended when this returns. What a rank has
    imported this process imports too, so that the next ones need not: a plugin may import much when it builds.

    Args:
        world: number of processes.
        function: what each runs; returns None where all is well.
        seconds: how long all of them may take; whoever hasn't spoken by then is ended, and that is what it says.
    """
    context = multiprocessing.get_context("fork")
    with TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        workers = [
            context.Process(target=_be_rank, args=(function, rank, world, Path(folder) / "store", pipes[rank][1]))
            for rank in range(world)
        ]
        try:
            for worker in workers:
                worker.start()
            for _, sender in pipes:
                sender.close()
            return _listen([receiver for receiver, _ in pipes], seconds=seconds)
        finally:
            for worker, (receiver, _) in zip(workers, pipes, strict=True):
                receiver.close()
                worker.kill()
                worker.join()


def _listen(receivers: Sequence[Connection], *, seconds: float) -> list[str | None]:
    """Return what each rank said; after the first trouble the others are not waited for."""
    said: list[str | None] = [f"it did not end within {seconds:g} seconds"] * len(receivers)
    open_pipes = dict(enumerate(receivers))
    deadline = time.monotonic() + seconds
    while open_pipes and (left := deadline - time.monotonic()) > 0:
        ready = wait(list(open_pipes.values()), timeout=left)
        for rank in [rank for rank, pipe in open_pipes.items() if pipe in ready]:
            try:
                said[rank], imported = json.loads(open_pipes.pop(rank).recv_bytes())
                _import(imported)
            except EOFError:
                said[rank] = "its process ended without a word"
            if said[rank] is not None:
                return [said[rank] if other == rank else None for other in range(len(receivers))]
    return said


def _import(names: Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(Exception):  # it can't be imported by itself
            importlib.import_module(name)


def _be_rank(function: Callable[[], str | None], rank: int, world: int, store: Path, sender: Connection) -> None:
    # One thread: the pool of a parent that has computed on several is not there in its child.
    torch.set_num_threads(1)
    known = set(sys.modules)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    dist.barrier()  # one that has nothing to look at ends at once, while others may still be connecting to it
    try:
        said = function()
        if said is None:
            with suppress(Exception):  # whoever ended it has said why
                dist.barrier()  # else others may still be connecting to this process
    except Exception as error:  # noqa: BLE001 - whatever a plugin raises is a verdict on it
        trace = "".join(traceback.format_tb(error.__traceback__)[-1:])
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        said = f"{type(error).__name__}: {error}{notes}\n{trace}".rstrip()
    sender.send_bytes(json.dumps([said, [name for name in sys.modules if name not in known]]).encode())
    os._exit(0)  # without the farewell of groups whose other ranks may be gone
