"""`TensorAxis`: spans, and enter and leave as each other's adjoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mimo.model.parallel.collectives import exchange
from mimo.model.runtime import TensorAxis


@pytest.mark.parametrize(
    ("total", "size", "spans"),
    [(6, 3, [2, 2, 2]), (5, 4, [2, 2, 1, 0]), (1, 3, [1, 0, 0]), (0, 2, [0, 0]), (7, 2, [4, 3])],
)
def test_spans_are_those_of_torch_chunk(total: int, size: int, spans: list[int]) -> None:
    """Indices are cut with a rounded-up share each, so that the last ranks may hold fewer or none."""
    cut = [TensorAxis(rank=rank, size=size).span(total) for rank in range(size)]
    assert [len(span) for span in cut] == spans
    assert [index for span in cut for index in span] == list(range(total))


def test_one_rank_does_nothing() -> None:
    """With size 1 a tensor goes through unchanged, the very same object."""
    x = torch.empty(3, 2, device="meta")
    axis = TensorAxis(sequence_parallel=True)
    for method in (axis.enter, axis.leave, axis.total, axis.largest, axis.smallest, axis.gather, axis.scatter):
        assert method(x) is x


def _check_adjoint(rank: int, sequence_parallel: bool, rows: int) -> None:
    world = dist.get_world_size()
    axis = TensorAxis.of(DeviceMesh("cpu", range(world), mesh_dim_names=("tp",)), sequence_parallel=sequence_parallel)
    assert (axis.rank, axis.size) == (rank, world)
    generator = torch.Generator().manual_seed(7)
    whole = torch.randn(rows, 2, generator=generator, dtype=torch.float64)
    partial = torch.randn(world, rows, 2, generator=generator, dtype=torch.float64)
    span = axis.span(rows) if sequence_parallel else range(rows)
    outside = slice(span.start, span.stop)

    inside = whole[outside].clone().requires_grad_()
    entered = axis.enter(inside)
    assert torch.equal(entered, whole)
    entered.backward(partial[rank])
    torch.testing.assert_close(inside.grad, partial.sum(0)[outside], rtol=0, atol=1e-14)

    mine = partial[rank].clone().requires_grad_()
    left = axis.leave(mine)
    torch.testing.assert_close(left, partial.sum(0)[outside], rtol=0, atol=1e-14)
    left.backward(whole[outside])
    assert mine.grad is not None
    assert torch.equal(mine.grad, whole)

    assert torch.equal(axis.largest(partial[rank]), partial.amax(0))
    assert torch.equal(axis.smallest(partial[rank]), partial.amin(0))
    copies = [torch.empty_like(whole) for _ in range(world)]
    dist.all_gather(copies, axis.total(partial[rank]))
    assert all(torch.equal(copy, copies[0]) for copy in copies)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("world", "rows"), [(2, 4), (3, 6), (2, 0)])
def test_enter_and_leave(run_ranks: Callable[..., list[Any]], world: int, rows: int, sequence_parallel: bool) -> None:
    """Enter hands everybody all rows and sums gradients; leave sums and hands gradients to everybody; no rows too."""
    run_ranks(world, _check_adjoint, sequence_parallel, rows)


def _check_large_sums(rank: int) -> None:
    axis = TensorAxis.of(DeviceMesh("cpu", range(2), mesh_dim_names=("tp",)))
    generator = torch.Generator().manual_seed(7)
    for dtype in (torch.float32, torch.bfloat16):
        for columns in (1023, 1024, 1025):  # of wider rows
            both = torch.randn(2, 1024, 1026, generator=generator).to(dtype)[..., :columns]
            given = both[rank].clone()
            assert torch.equal(axis.total(both[rank]), both[0] + both[1])
            assert torch.equal(axis.largest(both[rank]), both.amax(0))
            assert torch.equal(axis.smallest(both[rank]), both.amin(0))
            assert torch.equal(both[rank], given), "what is combined is left as it was"
    odd = torch.randn(2, (1 << 20) + 1, generator=generator)
    assert torch.equal(axis.total(odd[rank]), odd[0] + odd[1])


def test_two_ranks_share_the_sum_of_many_elements(run_ranks: Callable[..., list[Any]]) -> None:
    """Each makes one half, to the bit what it would be if it made all."""
    run_ranks(2, _check_large_sums)


SIZES = (0, 3, 1 << 15, 1 << 18)
"""Numbers of fp64 in a message: none, few, and many, some more than the buffers of a socket hold."""


def _check_messages(rank: int) -> None:
    group, world = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    for shift in range(len(SIZES)):

        def message(sender: int, receiver: int, shift: int = shift) -> torch.Tensor:
            size = SIZES[(shift + 2 * sender + sender * receiver) % len(SIZES)]
            return torch.arange(size, dtype=torch.float64) + 10 * sender + receiver

        sent = [message(rank, peer) for peer in range(world)]
        received = [torch.full_like(message(peer, rank), torch.nan) for peer in range(world)]
        exchange(group, sent=sent.__getitem__, received=received.__getitem__)
        assert all(torch.equal(received[peer], message(peer, rank)) for peer in range(world) if peer != rank)


@pytest.mark.parametrize("world", [2, 4])
def test_messages_of_any_sizes_arrive(run_ranks: Callable[..., list[Any]], world: int) -> None:
    """A rank may have nothing to send to one that sends it much, and messages may be larger than what is on its way."""
    run_ranks(world, _check_messages)
