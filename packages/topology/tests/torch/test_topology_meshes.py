"""Groups and meshes on real processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mimo.topology import Grid, Module, ModuleGraph
from mimo.topology.meshes import Meshes


def overlapping() -> ModuleGraph:
    """Vision on ranks 0-2 over tensor ranks, language on 1-2 over lanes, rank 3 in a gap."""
    vision, language = Grid(name="vision", ranks=range(3), tp=3), Grid(name="language", ranks=range(1, 3), dp=2)
    return ModuleGraph(
        modules=(Module(grid=vision, trains=(True,)), Module(grid=language, trains=(True,))),
        arrows=(("vision", "language"),),
    )


def _sums(rank: int) -> tuple[list[float], int]:
    """Return sums of 10**rank over each axis of this rank's modules, and the size of the last one's tensor mesh."""
    graph = overlapping()
    meshes = Meshes(graph, rank=rank, device_type="cpu")
    sums, size = [], 0
    for module in graph.modules:
        if rank in module.grid.ranks:
            for axes in (("tp",), ("dp", "cp")):
                value = torch.tensor(float(10**rank))
                dist.all_reduce(value, group=meshes.axes_group(module.grid, axes))
                sums.append(value.item())
            size = meshes.tensor_mesh(module.grid).size()
    return sums, size


def test_topology_groups_of_overlapping_grids_work_together(run_ranks: Callable[..., list[Any]]) -> None:
    """Ranks in two, one or no module make the same groups and reduce over the right ranks."""
    assert run_ranks(4, _sums) == [
        ([111.0, 1.0], 3),
        ([111.0, 10.0, 10.0, 110.0], 1),
        ([111.0, 100.0, 100.0, 110.0], 1),
        ([], 0),
    ]
