"""One helper for tests that compute: forked workers joined by gloo. The pytest process itself computes nothing."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first DTensor imports it: better once here than in every worker
import torch.distributed as dist

PATIENCE_SECONDS = 120
torch.set_num_threads(1)  # a parent that has started threads hangs its forked children


def _work(
    rank: int, world: int, store: str, pipe: Connection, function: Callable[..., None], args: tuple[Any, ...]
) -> None:
    said = ""
    try:
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
        function(rank, world, *args)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - whatever it is, the parent shows it
        said = traceback.format_exc()
    pipe.send(said)


def _failures(ends: list[Connection]) -> list[str]:
    """Wait for every rank's word, and return what those said that failed, as soon as one has."""
    failures = []
    waiting = list(ends)
    while waiting and not failures:
        ready = wait(waiting, timeout=PATIENCE_SECONDS)
        if not ready:
            return [f"no answer from {len(waiting)} ranks in {PATIENCE_SECONDS} s"]
        for end in ready:
            assert isinstance(end, Connection)
            waiting.remove(end)
            try:
                said = end.recv()
            except EOFError:
                said = "died without a word"
            if said:
                failures.append(f"rank {ends.index(end)}:\n{said}")
    return failures


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[..., None]:
    """Run ``function(rank, world, *args)`` in ``world`` forked workers; the first failure ends them all."""

    def run(world: int, function: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("fork")
        store = tmp_path / "store"
        ends, workers = [], []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            worker = context.Process(target=_work, args=(rank, world, str(store), theirs, function, args))
            worker.start()
            theirs.close()
            ends.append(ours)
            workers.append(worker)
        failures = ["interrupted"]
        try:
            failures = _failures(ends)
        finally:
            for worker in workers:
                if failures:
                    worker.kill()
                worker.join()
            store.unlink(missing_ok=True)
        if failures:
            pytest.fail("\n".join(failures), pytrace=False)

    return run
