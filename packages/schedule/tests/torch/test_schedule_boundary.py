"""The boundary between random placements: a plain gather forward, its adjoint backward, copies counted once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mimo.schedule import End, Route, boundary_route
from mimo.schedule.runtime import Boundary, Channel, open_channels
from mimo.schedule.runtime.join import Join, Parts, join_of
from mimo.topology import Grid, Module, ModuleGraph, Ownership

WORLD = 8
WIDTH = 3
MICROBATCHES = 2


def draw_rows(generator: torch.Generator, rows: int) -> list[Tensor]:
    """Draw all rows of the edge [rows, WIDTH] for each microbatch."""
    shape = (rows, WIDTH)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(MICROBATCHES)]


Groups = dict[tuple[int, ...], dist.ProcessGroup]
"""Tensor groups by ranks, each made once for all cases."""


def tensor_group(rank: int, end: End, groups: Groups) -> dist.ProcessGroup | None:
    """Return this rank's tensor group where it is at this end; make all groups of the grid, on every rank."""
    for ranks in end.grid.groups(("tp",)):
        if ranks not in groups:
            group = dist.new_group(ranks)
            assert group is not None
            groups[ranks] = group
    return groups[end.grid.group_of(rank, ("tp",))] if rank in end.grid.stage_ranks(end.stage) else None


def run_case(rank: int, edge: Any, generator: torch.Generator, groups: Groups) -> None:
    """Move rows there and gradients back for one pair of placements, and compare with what must arrive."""
    ends: tuple[End, End] = (edge.source, edge.target)
    graph = ModuleGraph(
        modules=tuple(Module(grid=end.grid, trains=(True,) * end.grid.pp) for end in ends),
        arrows=(("source", "target"),),
    )
    channels, tensor_groups = open_channels(graph), [tensor_group(rank, end, groups) for end in ends]
    boundary = Boundary(
        rank=rank,
        width=WIDTH,
        dtype=torch.float64,
        device=torch.device("cpu"),
        channels=channels["source->target"],
        source_group=tensor_groups[0],
        target_group=tensor_groups[1],
    )
    held, wanted = (edge.rows_of(end).get(rank) for end in ends)
    counts = [any(cell[0] == rank for cell in edge.cells(end)) for end in ends]
    route = boundary_route(rank=rank, source=edge.source, target=edge.target, rows=edge.rows)
    every, weights = (draw_rows(generator, sum(edge.rows)) for _ in ends)
    microbatches = range(MICROBATCHES)
    sent: list[Tensor] = []

    # All that is awaited is awaited before anything is sent, as a plan may do it.
    arriving = [] if wanted is None else [boundary.receive(route, microbatch) for microbatch in microbatches]
    sums = torch.zeros(2, dtype=torch.float64)
    if held is not None:
        returning = [boundary.receive_gradient(route, microbatch) for microbatch in microbatches]
        for microbatch in microbatches:
            sent.append(every[microbatch][held])
            boundary.send(route, microbatch, sent[-1])
    if wanted is not None:
        for microbatch in microbatches:
            found = arriving[microbatch].wait()
            assert torch.equal(found, every[microbatch][wanted]), edge
            sums[0] += counts[1] * (found * weights[microbatch][wanted]).sum()
            sent.append(weights[microbatch][wanted])
            boundary.send_gradient(route, microbatch, sent[-1])
    if held is not None:
        for microbatch in microbatches:
            gradient = returning[microbatch].wait()
            assert torch.equal(gradient, weights[microbatch][held]), edge
            sums[1] += counts[0] * (gradient * every[microbatch][held]).sum()
    boundary.flush()
    assert not any(rows._version for rows in sent), "what was sent was written to"
    dist.all_reduce(sums)
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-12, atol=1e-12)


def run_cases(rank: int, draw_edge: Callable[[random.Random, int], Any], first: int, count: int) -> int:
    """Run many cases in one group."""
    groups: Groups = {}
    for seed in range(first, first + count):
        run_case(rank, draw_edge(random.Random(seed), WORLD), torch.Generator().manual_seed(seed), groups)
    return count


@pytest.mark.parametrize("first", range(0, 240, 80))
def test_schedule_boundary_is_a_gather_and_its_adjoint(
    first: int, draw_edge: Callable[..., Any], run_ranks: Callable[..., list[Any]]
) -> None:
    """Random lanes, slices of all kinds and overlaps, with empty samples and lanes: rows and gradients arrive once.

    The product of what arrives with any weights is that of what was sent with their way back, copies counted once.
    """
    assert run_ranks(WORLD, run_cases, draw_edge, first, 80) == [80] * WORLD


def run_edges(rank: int, edges: list[Any]) -> int:
    """Run given cases in one group."""
    groups: Groups = {}
    for seed, edge in enumerate(edges):
        run_case(rank, edge, torch.Generator().manual_seed(seed), groups)
    return len(edges)


def test_schedule_boundary_between_all_layouts_of_the_same_ranks(
    same_ranks: list[Any], run_ranks: Callable[..., list[Any]]
) -> None:
    """Where much stays on its rank, what others need of it, or of its gradient, still reaches them."""
    assert run_ranks(WORLD, run_edges, same_ranks) == [len(same_ranks)] * WORLD


def alone() -> Boundary:
    """Return a boundary of which one rank is both ends."""
    channels = (Channel(group=None, tag=0), Channel(group=None, tag=1))  # without a process group, none may be used
    return Boundary(
        rank=0,
        width=WIDTH,
        dtype=torch.float32,
        device=torch.device("cpu"),
        channels=channels,
        source_group=None,
        target_group=None,
    )


def test_schedule_boundary_looks_a_route_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each direction, and again when many others have been used since."""
    seen: list[int] = []

    def noted(parts: Parts, rows: int, group: dist.ProcessGroup | None) -> Join:
        seen.append(rows)
        return join_of(parts, rows, group)

    monkeypatch.setattr("mimo.schedule.runtime.boundary.join_of", noted)
    end, boundary = End(grid=Grid(name="both", ranks=(0,)), stage=0, owners=Ownership.even(1, 1)), alone()
    routes = [boundary_route(rank=0, source=end, target=end, rows=(rows,)) for rows in range(1, 201)]

    def move(route: Route) -> None:
        rows = torch.full((route.held, WIDTH), float(route.held))
        arriving, returning = boundary.receive(route, 0), boundary.receive_gradient(route, 0)
        boundary.send(route, 0, rows)
        boundary.send_gradient(route, 0, 2 * rows)
        assert torch.equal(arriving.wait(), rows)
        assert torch.equal(returning.wait(), 2 * rows)
        boundary.flush()

    for _ in range(3):
        move(routes[0])
    assert seen == [1, 1]
    for route in routes:
        move(route)
    seen.clear()
    move(routes[-1])
    move(routes[0])
    assert seen == [1, 1]


def test_schedule_boundary_leaves_rows_in_place() -> None:
    """Rows that stay, whole or a slice of them, are neither sent nor copied, nor are their gradients."""
    boundary = alone()
    end = End(grid=Grid(name="both", ranks=(0,)), stage=0, owners=Ownership.even(2, 1))
    route = boundary_route(rank=0, source=end, target=end, rows=(4, 1))
    rows, gradient = torch.ones(5, WIDTH), torch.ones(5, WIDTH)
    arriving = boundary.receive(route, 0)
    boundary.send(route, 0, rows)
    assert arriving.wait().data_ptr() == rows.data_ptr()
    returning = boundary.receive_gradient(route, 0)
    boundary.send_gradient(route, 0, gradient)
    assert returning.wait().data_ptr() == gradient.data_ptr()
    boundary.flush()
