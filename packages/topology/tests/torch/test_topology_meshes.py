"""Groups and meshes on real processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from mimo.topology import Grid, Module, ModuleGraph
from mimo.topology.meshes import Meshes, as_parameter


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


def _pieces(rank: int, shard_lanes: int) -> dict[bool, tuple[tuple[str, ...], list[int], list[float]]]:
    """Return axes of the mesh of parameters, this rank's place in it, and sums of 10**rank along each of them.

    By whether it is that of experts.
    """
    grid = Grid(name="language", ranks=range(1, 9), dp=4, tp=2, ep=2)
    graph = ModuleGraph(modules=(Module(grid=grid, trains=(True,), experts=True, shard_lanes=shard_lanes),), arrows=())
    meshes = Meshes(graph, rank=rank, device_type="cpu")
    found = {}
    for experts in (False, True) if rank else ():
        mesh, sums = meshes.parameter_mesh(grid, experts=experts), []
        for axis in range(mesh.ndim):
            value = torch.tensor(float(10**rank), dtype=torch.float64)
            dist.all_reduce(value, group=mesh.get_group(axis))
            sums.append(value.item())
        assert meshes.shard_mesh(grid, experts=experts).get_group().size() == mesh.size(mesh.ndim - 1)
        found[experts] = (mesh.mesh_dim_names or (), list(mesh.get_coordinate() or ()), sums)
    return found


def test_topology_parameters_are_cut_over_tensor_ranks_before_lanes(run_ranks: Callable[..., list[Any]]) -> None:
    """Places and groups of a mesh agree, with all lanes in one and with copies, for experts too."""
    in_one, in_twos = run_ranks(9, _pieces, 0)[4], run_ranks(9, _pieces, 2)[6]
    # Rank 4 is the second tensor rank of lane 1, and holds the second half of the experts, as second of their lanes.
    assert in_one[False] == (("tp", "data"), [1, 1], [11e3, 101010100.0])
    assert in_one[True] == (("ep", "etp", "data"), [1, 0, 1], [11e3, 1e4, 101010100.0])
    # Rank 6 is the second tensor rank of lane 2: the first of the second two.
    assert in_twos[False] == (("replica", "tp", "data"), [1, 1, 0], [1000100.0, 11e5, 101e6])
    assert in_twos[True] == (("replica", "ep", "etp", "data"), [1, 1, 0, 0], [1000100.0, 11e5, 1e6, 101e6])


def _learned(_rank: int) -> tuple[bool, list[str], list[float]]:
    """Return what a module makes of a parameter of two ranks, and its gradient here."""
    mesh = init_device_mesh("cpu", (2,))
    value = DTensor.from_local(torch.ones(2), mesh, (Shard(0),), run_check=False)
    module = nn.Module()
    module.weight = as_parameter(value, requires_grad=True)
    (3 * value.to_local()).sum().backward()
    assert isinstance(value.grad, DTensor)
    frozen = as_parameter(DTensor.from_local(torch.ones(2), mesh, (Shard(0),)), requires_grad=False)
    names = [name for name, _ in module.named_parameters()]
    return frozen.requires_grad, names, value.grad.to_local().tolist()


def test_topology_sharded_tensors_become_parameters(run_ranks: Callable[..., list[Any]]) -> None:
    """A module finds them, and they learn if they are to."""
    assert run_ranks(2, _learned) == [(False, ["weight"], [3.0, 3.0])] * 2
