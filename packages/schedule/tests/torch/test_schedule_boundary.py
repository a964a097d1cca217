"""The boundary between random placements: a plain gather forward, its adjoint backward, copies counted once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mimo.schedule import boundary_route
from mimo.schedule.runtime import Boundary, open_channels
from mimo.topology import Grid, Module, ModuleGraph, Ownership
from mimo.topology.meshes import Meshes

WORLD = 6
WIDTH = 3


def draw_grid(rng: random.Random, name: str) -> Grid:
    """Draw a grid of up to `WORLD` ranks, anywhere in the world."""
    pp, dp, tp = rng.choice(
        [(pp, dp, tp) for pp in (1, 2) for dp in range(1, 7) for tp in range(1, 7) if pp * dp * tp <= WORLD]
    )
    return Grid(name=name, ranks=sorted(rng.sample(range(WORLD), pp * dp * tp)), pp=pp, dp=dp, tp=tp)


def draw_rows(rng: random.Random) -> list[int]:
    """Draw rows per sample: none at all, a few, uneven."""
    return [rng.choice([0, 0, 1, 2, 5]) for _ in range(rng.randrange(8))]


def run_case(rank: int, seed: int) -> None:
    """Move rows there and gradients back for one random pair of placements, and compare with what must arrive."""
    rng = random.Random(seed)
    source, target = draw_grid(rng, "source"), draw_grid(rng, "target")
    if rng.random() < 0.25:
        target = Grid(name="target", ranks=source.ranks, pp=source.pp, dp=source.dp, tp=source.tp)
    rows = draw_rows(rng)
    graph = ModuleGraph(
        modules=tuple(Module(grid=grid, trains=(True,) * grid.pp) for grid in (source, target)),
        arrows=(("source", "target"),),
    )
    owners = {grid.name: Ownership.even(len(rows), grid.dp) for grid in (source, target)}
    lane_cuts: list[list[int]] = []
    for lane in range(target.dp):
        total = sum(rows[position] for position in owners["target"].span(lane))
        lane_cuts.append([0, *sorted(rng.randint(0, total) for _ in range(target.tp - 1)), total])
    sliced = rng.random() < 0.5
    meshes = Meshes(graph, rank=rank, device_type="cpu")
    is_source = rank in source.stage_ranks(source.pp - 1)
    is_target = rank in target.stage_ranks(0)
    channels = open_channels(graph)
    if not (is_source or is_target):
        return
    boundary = Boundary(
        rank=rank,
        width=WIDTH,
        dtype=torch.float64,
        device=torch.device("cpu"),
        channels=channels["source->target"],
        source_group=meshes.axes_group(source, ("tp",)) if is_source else None,
        target_group=meshes.axes_group(target, ("tp",)) if is_target else None,
    )
    route = boundary_route(
        rank=rank,
        source=source,
        target=target,
        source_owners=owners["source"],
        target_owners=owners["target"],
        rows=rows,
        cuts=lane_cuts.__getitem__ if sliced else None,
    )
    starts = torch.tensor([0, *rows]).cumsum(0).tolist()
    every = torch.arange(starts[-1] * WIDTH, dtype=torch.float64).view(-1, WIDTH)

    def lane_rows(grid: Grid) -> torch.Tensor:
        bounds = owners[grid.name].bounds
        lane = grid.coordinates(rank).dp
        return every[starts[bounds[lane]] : starts[bounds[lane + 1]]]

    arriving = boundary.receive(route, 0) if is_target else None
    if is_source:
        boundary.send(route, 0, lane_rows(source).clone())
    returning = boundary.receive_gradient(route, 0) if is_source else None
    if arriving is not None:
        expected = lane_rows(target)
        if sliced:
            cuts, place = lane_cuts[target.coordinates(rank).dp], target.coordinates(rank)
            expected = expected[cuts[place.tp] : cuts[place.tp + 1]]
        found = arriving.wait()
        assert torch.equal(found, expected), (source, target, rows, sliced)
        boundary.send_gradient(route, 0, 1000 + 2 * found)
    if returning is not None:
        assert torch.equal(returning.wait(), 1000 + 2 * lane_rows(source)), (source, target, rows, sliced)
    boundary.flush()


def run_cases(rank: int, first: int, count: int) -> int:
    """Run many cases in one group."""
    for seed in range(first, first + count):
        run_case(rank, seed)
        dist.barrier()
    return count


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_schedule_boundary_is_a_gather_and_its_adjoint(first: int, run_ranks: Callable[..., list[Any]]) -> None:
    """Random lanes, tensor ranks, slices and overlaps, with empty samples and lanes: rows and gradients arrive once."""
    assert run_ranks(WORLD, run_cases, first, 40) == [40] * WORLD
