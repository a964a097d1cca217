"""Process groups and device meshes of all grids, made by one object on every rank.

Each rank makes the groups that it is in, each distinct set of ranks once, in one order on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mimo.topology._graph import ModuleGraph, StageId
from mimo.topology._grid import Grid
from mimo.topology._groups import (
    DATA,
    DATA_AXES,
    REPLICA,
    ROW_AXES,
    gather_groups,
    gradient_groups,
    needed_groups,
    spread,
    tied_pairs,
)
from mimo.topology.collectives import backend_for, connect, connects_late
from mimo.topology.member_groups import GroupMaker

__all__ = [
    "DATA_AXES",
    "ROW_AXES",
    "Meshes",
    "as_parameter",
    "gradient_of",
    "laid_out",
    "leaf_of",
    "local",
    "needed_groups",
    "tied_pairs",
]


def as_parameter(value: DTensor, *, requires_grad: bool) -> nn.Parameter:
    """Return a new DTensor, which nobody else holds, as a parameter: the same object.

    ``nn.Parameter(value)`` detaches it first, and DTensor then works out the layout of the result once for each shape,
    which takes longer than all else in making a small module.

    Args:
        value: a leaf of the graph of gradients.
        requires_grad: whether it learns.
    """
    assert value.is_leaf
    value.requires_grad_(requires_grad)
    value._is_param = True  # noqa: SLF001  # as nn.Parameter marks tensors of other classes
    return cast("nn.Parameter", value)


def local(value: Tensor) -> Tensor:
    """Return the piece of a DTensor that lies here, not a copy; a plain tensor is its own piece.

    Of a module's parameter it is the one that layers compute with, to which autograd gives the gradient.
    """
    # Not `to_local`, which makes a view, or an edge of the graph of gradients, and takes as long as a small product.
    return value._local_tensor if isinstance(value, DTensor) else value  # noqa: SLF001


def laid_out(piece: Tensor, *, like: Tensor) -> Tensor:
    """Return a tensor whose piece that lies here is ``piece``, on any device, and which lies as another one does.

    It learns nothing. `DTensor.from_local` would move it to the device of the mesh, and takes ten times as long.
    """
    return DTensor(piece, like._spec, requires_grad=False) if isinstance(like, DTensor) else piece  # noqa: SLF001


def leaf_of(parameter: nn.Parameter) -> Tensor:
    """Return what autograd gives a parameter's gradient to: its piece, or a DTensor that computes itself."""
    piece = local(parameter)
    return piece if piece.requires_grad else parameter


def gradient_of(parameter: nn.Parameter) -> Tensor | None:
    """Return this rank's piece of a parameter's gradient, in place; None where nothing has added to it."""
    return local(parameter).grad if parameter.grad is None else local(parameter.grad)


class Meshes:
    """The groups and meshes of one rank. Make it on every rank of the world, after the process group exists.

    The rank makes the groups that it is in. They have the backend alone that carries the device's tensors in the
    default group. Where that connects a group at its first use, each is used here, in the order in which all ranks make
    them.

    Args:
        graph: modules with their grids.
        rank: this process.
        device_type: ``cpu`` or ``cuda``, as `DeviceMesh` takes it.
        timeout: of every group; None: as the backend has it.
    """

    def __init__(self, graph: ModuleGraph, *, rank: int, device_type: str, timeout: timedelta | None = None) -> None:
        self.rank = rank
        self.device_type = device_type
        self._overlaps = {module.name: module.overlaps for module in graph.modules}
        self._shard_lanes = {module.name: module.shard_lanes for module in graph.modules}
        backend = backend_for(device_type)
        maker = GroupMaker(backend=backend, timeout=timeout)
        self._groups = {
            ranks: maker.make(ranks, purpose="computations")
            for ranks in (*needed_groups(graph), (rank,))
            if rank in ranks
        }
        self._gradient_groups = {
            (stage, ranks): maker.make(ranks, purpose=f"sums of {stage.module} {stage.stage}")
            for stage, ranks in gradient_groups(graph)
            if rank in ranks
        }
        self._gather_groups = {
            ranks: maker.make(ranks, purpose="gathers") for ranks in gather_groups(graph) if rank in ranks
        }
        if connects_late(backend):
            made = (self._groups, self._gradient_groups, self._gather_groups)
            connect([group for groups in made for group in groups.values()], device=torch.device(device_type))

    def group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Return the group of exactly these ranks, which hold this rank.

        Raises:
            KeyError: the graph needs no such group.
        """
        return self._groups[tuple(ranks)]

    def gradient_group(self, stage: StageId, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Return the group of the ranks of ``group`` for sums of a stage's gradients that begin while layers compute.

        Raises:
            KeyError: the stage has none, as its `mimo.topology.Module.overlaps` has no sums.
        """
        if group.size() == 1:
            return group
        return self._gradient_groups[stage, tuple(dist.get_process_group_ranks(group))]

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

    def shard_group(self, grid: Grid, *, experts: bool = False) -> dist.ProcessGroup:
        """Return the data lanes over which this rank's copy of a parameter, or of its experts, is spread."""
        return self.group(next(group for group in self._spread(grid, experts=experts)[0] if self.rank in group))

    def copies_group(self, grid: Grid, *, experts: bool = False) -> dist.ProcessGroup:
        """Return the data lanes that hold copies of this rank's piece of such a copy."""
        return self.group(next(group for group in self._spread(grid, experts=experts)[1] if self.rank in group))

    def shard_mesh(self, grid: Grid, *, experts: bool = False) -> DeviceMesh:
        """Return the one-dimensional mesh, axis `mimo.topology.DATA`, over which parameters are gathered.

        Its group is that of `shard_group`, or one for gathers alone of a module in which they overlap with all else.
        """
        group = self.shard_group(grid, experts=experts)
        if "gathers" in self._overlaps[grid.name]:
            group = self._gather_groups.get(tuple(dist.get_process_group_ranks(group)), group)
        return DeviceMesh.from_group(group, self.device_type, mesh_dim_names=(DATA,))

    def parameter_mesh(self, grid: Grid, *, experts: bool = False) -> DeviceMesh:
        """Return the mesh on which this rank's pieces of parameters lie that are spread over data lanes.

        Its axes are `mimo.topology.REPLICA` where there are copies, those of `tensor_mesh` or `expert_mesh`, and last
        `mimo.topology.DATA`: the piece of a tensor rank is cut once more.
        """
        held = {"ep": grid.ep, "etp": grid.etp} if experts else {"tp": grid.tp}
        groups = [self.axes_group(grid, (axis,)) for axis in held]
        copies, pieces = self.copies_group(grid, experts=experts), self.shard_group(grid, experts=experts)
        stage = torch.tensor(grid.stage_ranks(grid.coordinates(self.rank).pp))
        ranks = stage.view(copies.size(), pieces.size(), *held.values()).movedim(1, -1)
        names = (REPLICA, *held, DATA)
        groups = [copies, *groups, pieces]
        if copies.size() == 1:
            ranks, names, groups = ranks[0], names[1:], groups[1:]
        return DeviceMesh.from_group(groups, self.device_type, mesh=ranks.contiguous(), mesh_dim_names=names)

    def _spread(self, grid: Grid, *, experts: bool) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
        lanes = grid.group_of(self.rank, ("edp",) if experts else DATA_AXES)
        return spread(lanes, self._shard_lanes[grid.name])
