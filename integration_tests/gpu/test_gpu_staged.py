"""The process group of ranks that share a GPU does what gloo does, for the shapes that NCCL takes too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _staged import NAME, StagedGroup, staged_backend
from torch import Tensor

from mimo.testing import Pool
from mimo.topology.collectives import all_gather_single, reduce_scatter_single

WORLD = 3


def both(rank: int, name: str) -> tuple[list[Tensor], list[Tensor], bool]:
    """Do an operation by gloo and by the staged group; return results, and whether the group is what it should be."""
    assert staged_backend("cpu") == NAME
    staged = dist.new_group(backend=NAME)
    kind = isinstance(staged, StagedGroup) and dist.get_backend(staged) == NAME and staged.group_name != ""
    results = [OPERATIONS[name](rank, group) for group in (dist.group.WORLD, staged)]
    return results[0], results[1], kind


def _x(rank: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


def _reduced(rank: int, group: Any) -> list[Tensor]:
    x, y = _x(rank, 4, 3), _x(rank, 5)
    dist.all_reduce(x, group=group)
    work = dist.all_reduce(y, op=dist.ReduceOp.MAX, group=group, async_op=True)
    assert work is not None
    work.wait()
    work.wait()  # a second time it is there already
    assert work.is_completed()
    return [x, y]


def _cast(rank: int, group: Any) -> list[Tensor]:
    x = _x(rank, 4, 3)
    dist.broadcast(x, src=1, group=group)
    return [x]


def _gathered(rank: int, group: Any) -> list[Tensor]:
    x = _x(rank, 4, 3)
    stacked, listed = torch.empty(WORLD, 4, 3), [torch.empty(4, 3) for _ in range(WORLD)]
    all_gather_single(stacked, x, group)
    dist.all_gather(listed, x, group=group)
    here = [torch.empty(4, 3) for _ in range(WORLD)] if rank == 0 else None
    dist.gather(x, here, dst=0, group=group)
    return [stacked, *listed, *(here or [])]


def _scattered(rank: int, group: Any) -> list[Tensor]:
    single = torch.empty(4, 3)
    reduce_scatter_single(single, _x(rank, WORLD, 4, 3), group)
    own = torch.empty(2)
    dist.scatter(own, [_x(peer, 2) for peer in range(WORLD)] if rank == 0 else None, src=0, group=group)
    return [single, own]


def _exchanged(rank: int, group: Any) -> list[Tensor]:
    """Send each peer as many rows as its rank says, none to the first."""
    received, sent = [rank] * WORLD, list(range(WORLD))
    output = torch.empty(sum(received), 2)
    dist.all_to_all_single(output, _x(rank, sum(sent), 2), received, sent, group=group)
    return [output]


def _messages(rank: int, group: Any) -> list[Tensor]:
    """Send around by two tags, received in the other order; what is sent may change at once where it is copied."""
    x, y, one, other = _x(rank, 3), _x(rank, 2, 2), torch.empty(3), torch.empty(2, 2)
    following, before = (rank + 1) % WORLD, (rank - 1) % WORLD
    works = [dist.irecv(other, before, group=group, tag=2), dist.irecv(one, before, group=group, tag=1)]
    works += [dist.isend(x, following, group=group, tag=1), dist.isend(y, following, group=group, tag=2)]
    for work in works:
        assert work is not None
        work.wait()
    dist.barrier(group=group)
    return [one, other]


def _functional(rank: int, group: Any) -> list[Tensor]:
    """Do what DTensor does, by operations that C++ hands to the group."""
    from torch.distributed import _functional_collectives as functional

    x = _x(rank, WORLD * 2, 3)
    found = [
        functional.all_gather_tensor(x, 0, group),
        functional.reduce_scatter_tensor(x, "sum", 0, group),
        functional.all_reduce(x, "sum", group),
        functional.all_to_all_single(x, None, None, group),
    ]
    return [functional.wait_tensor(each) for each in found]


OPERATIONS: dict[str, Callable[[int, Any], list[Tensor]]] = {
    "reduced": _reduced,
    "cast": _cast,
    "gathered": _gathered,
    "scattered": _scattered,
    "exchanged": _exchanged,
    "messages": _messages,
    "functional": _functional,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_staged_operations_equal_those_of_gloo(name: str, pool: Pool) -> None:
    """Every one that our code or torch's on its behalf calls, to the bit."""
    for expected, found, kind in pool.run(WORLD, both, name):
        assert kind
        assert len(expected) == len(found) > 0
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one, other)
