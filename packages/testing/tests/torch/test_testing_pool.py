"""The pool that other tests run in: it stays, its runs leave nothing behind, and no fault goes unnoticed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from mimo.testing import Pool, RanksError


@pytest.fixture
def own_pool() -> Iterator[Pool]:
    """A pool of this test alone, which it may harm."""
    with Pool() as pool:
        yield pool


def where(rank: int) -> tuple[int, int, int]:
    """Return this rank, the sum of all, and the process that this one was forked from."""
    total = torch.tensor(rank)
    dist.all_reduce(total)
    return rank, int(total), os.getppid()


def gather(rank: int, ranks: list[list[int]]) -> float:
    """Return the sum of a DTensor that lies on this rank's mesh among several of one shape."""
    meshes = [DeviceMesh("cpu", members) for members in ranks]
    for members, mesh in zip(ranks, meshes, strict=True):
        if rank in members:
            value = distribute_tensor(torch.arange(5.0) * (1 + members[0]), mesh, [Shard(0)])
            return float(value.redistribute(placements=[Replicate()]).to_local().sum())
    return 0.0


def fail(rank: int, how: str) -> None:
    """Fail on rank 1, for which the others wait."""
    if rank == 1:
        if how == "error":
            raise KeyError("lost")
        os.kill(os.getppid() if how == "parent" else os.getpid(), signal.SIGKILL)
        signal.pause()
    dist.barrier()


def test_one_process_forks_the_ranks_of_runs_of_any_size(own_pool: Pool) -> None:
    """Each rank's result comes back in its place, whatever ran before."""
    first = own_pool.run(3, where)
    assert [(rank, total) for rank, total, _ in first] == [(0, 3), (1, 3), (2, 3)]
    assert len({parent for _, _, parent in first}) == 1
    assert own_pool.run(2, where) == [(rank, 1, parent) for rank, _, parent in first[:2]]
    assert own_pool.run(3, where) == first


def import_late(rank: int) -> bool:
    """Return whether a module that nothing else here needs has been imported, and import it."""
    known = "sched" in sys.modules
    import sched  # noqa: F401

    return known


def test_what_ranks_import_those_of_the_next_run_need_not(own_pool: Pool) -> None:
    """Nor what is prepared for all runs."""
    assert own_pool.run(2, import_late) == [False, False]
    assert own_pool.run(1, import_late) == [True]
    with Pool(partial(import_late, 0)) as prepared:
        assert prepared.run(2, import_late) == [True, True]


def import_of(_name: str, rank: int) -> bool:
    """Do as `import_late`, before a run with these arguments."""
    return import_late(rank)


def was_imported(_rank: int, _name: str, _number: int) -> bool:
    """Return whether it has been done before this process was forked."""
    return import_late(0)


def test_what_is_done_ahead_of_a_run_takes_its_arguments() -> None:
    """In the process that its ranks are forked from."""
    with Pool(ahead=import_of) as prepared:
        assert prepared.run(2, was_imported, "once", 0) == [True, True]


def test_meshes_of_one_shape_on_other_ranks_are_not_confused(own_pool: Pool) -> None:
    """What torch keeps by mesh in one run is unknown in the next one."""
    for ranks in ([[0, 1], [2]], [[0], [1, 2]], [[2], [0, 1]]):
        expected = {member: 10.0 * (1 + members[0]) for members in ranks for member in members}
        assert own_pool.run(3, gather, ranks) == [expected[rank] for rank in range(3)]


def test_what_is_recalled_was_run_once_for_all_pools_of_a_folder(tmp_path: Path) -> None:
    """Other arguments are another run; a pool without a folder runs for itself."""
    with Pool(folder=tmp_path) as first, Pool(folder=tmp_path) as second, Pool() as own:
        found = first.recall(2, where)
        assert first.recall(2, where) == second.recall(2, where) == found
        assert second.recall(1, where) != found[:1]
        assert own.recall(2, where) == own.recall(2, where) != found


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("error", "KeyError: 'lost'"),
        ("rank", "ended without a result, exit code -9"),
        ("parent", "who forked it is gone"),
    ],
)
def test_a_fault_is_reported_by_rank_and_the_pool_still_works(own_pool: Pool, how: str, message: str) -> None:
    """Ranks that wait for the failed one are ended; who forks them is replaced if it is gone."""
    with pytest.raises(RanksError, match=rf"(?s)rank 1:\n[^\0]*{message}"):
        own_pool.run(3, fail, how)
    assert [total for _, total, _ in own_pool.run(3, where)] == [3, 3, 3]
