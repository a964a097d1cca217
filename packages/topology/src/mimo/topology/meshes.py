"""Process groups and device meshes of all grids, made by one object on every rank in one global order.

Names of process groups come from a counter in each process, so a group that only its members make would put all
later ones out of step. `Meshes` therefore makes every group on every rank, each distinct set of ranks once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mimo.topology._graph import ModuleGraph
from mimo.topology._grid import Grid
from mimo.topology._groups import DATA_AXES, ROW_AXES, needed_groups, tied_pairs

__all__ = ["DATA_AXES", "ROW_AXES", "Meshes", "needed_groups", "tied_pairs"]


class Meshes:
    """The groups and meshes of one rank. Make it on every rank of the world, after the process group exists.

    Args:
        graph: modules with their grids.
        rank: this process.
        device_type: ``cpu`` or ``cuda``, as `DeviceMesh` takes it.
    """

    def __init__(self, graph: ModuleGraph, *, rank: int, device_type: str) -> None:
        self.rank = rank
        self.device_type = device_type
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {
            ranks: dist.new_group(list(ranks)) for ranks in needed_groups(graph)
        }
        # A group of one needs nobody else, so it is made locally and leaves the counter alone.
        self._groups[(rank,)] = dist.new_group([rank], use_local_synchronization=True)

    def group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Return the group of exactly these ranks, which hold this rank.

        Raises:
            KeyError: the graph needs no such group.
        """
        return self._groups[tuple(ranks)]

    def axes_group(self, grid: Grid, axes: Iterable[str]) -> dist.ProcessGroup:
        """Return this rank's group along ``axes`` of ``grid``."""
        return self.group(grid.group_of(self.rank, axes))

    def tensor_mesh(self, grid: Grid) -> DeviceMesh:
        """Return the one-dimensional mesh, axis ``tp``, on which this rank's parameters of the module lie."""
        return DeviceMesh.from_group(self.axes_group(grid, ("tp",)), self.device_type, mesh_dim_names=("tp",))

    def expert_mesh(self, grid: Grid) -> DeviceMesh:
        """Return the mesh of axes ``ep`` and ``etp`` on which this rank's experts lie, of a module that has them."""
        ranks = grid.group_of(self.rank, ("ep", "etp"))
        return DeviceMesh.from_group(
            [self.axes_group(grid, ("ep",)), self.axes_group(grid, ("etp",))],
            self.device_type,
            mesh=torch.tensor(ranks).view(grid.ep, grid.etp),
            mesh_dim_names=("ep", "etp"),
        )
