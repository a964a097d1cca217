"""What an optimizer plugin hands in. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from mimo.topology import Coordinates, ExpertCoordinates, Grid

if TYPE_CHECKING:
    import torch
    from torch import nn

    from mimo.topology.meshes import Meshes


@attrs.frozen(kw_only=True)
class ModuleParameters:
    """Parameters of one module that train on this rank, as an optimizer needs to know them.

    Args:
        grid: the module's grid; its name is the module's.
        rank: this process.
        parameters: DTensors on the module's tensor mesh, or its expert mesh, by full name, in the same order on every
            rank that holds the same stages.
        summed: names of which each tensor rank computes only part of the gradient.
        tied: names of which the first and the last stage each hold a copy; stage 0 owns and counts them.
        experts: names of those on the expert mesh ``(ep, etp)``, of which each rank along ``edp`` holds a copy and only
            part of the gradient.
    """

    grid: Grid
    rank: int
    parameters: Mapping[str, nn.Parameter]
    summed: frozenset[str] = frozenset()
    tied: frozenset[str] = frozenset()
    experts: frozenset[str] = frozenset()

    @property
    def place(self) -> Coordinates:
        """Where this rank stands in the module's grid."""
        return self.grid.coordinates(self.rank)

    @property
    def expert_place(self) -> ExpertCoordinates:
        """Where this rank stands in the expert view of the grid."""
        return self.grid.expert_coordinates(self.rank)

    def only(self, names: Iterable[str]) -> ModuleParameters:
        """Return those of ``names`` alone."""
        kept = {name: self.parameters[name] for name in names}
        return attrs.evolve(
            self,
            parameters=kept,
            summed=self.summed & kept.keys(),
            tied=self.tied & kept.keys(),
            experts=self.experts & kept.keys(),
        )

    def is_counted(self, name: str) -> bool:
        """Tell whether this lane and this stage, and not another with a copy, count the parameter."""
        if name in self.experts:
            return self.expert_place.edp == 0
        return self.place.dp == self.place.cp == 0 and (name not in self.tied or self.place.pp == 0)


@attrs.frozen
class Prepared:
    """How gradients lie over the data lanes: ``reduce()`` leaves each one summed over the whole step."""

    reduce: Callable[[], None]


@attrs.frozen(kw_only=True)
class OptimizerSpec:
    """An optimizer plugin.

    Args:
        name: what users write as ``optimizer.plugin``.
        config: attrs class of its own settings; learning rate, schedule and clipping are `MimoOptimizer`'s.
        rendezvous: whether a forward or backward under this config gathers parameters over the data lanes.
        prepare: decides how parameters and gradients lie over the data lanes, before the first step. Called once for
            each stage of a module, whose gradients are reduced together, and for what several stages here share.
        build: makes the optimizer of one module, over all its stages here; its state is scalars, and tensors or
            DTensors shaped like the parameter, all present from the start.
    """

    name: str
    config: type
    rendezvous: Callable[[Any], bool]
    prepare: Callable[[ModuleParameters, Meshes, Any], Prepared]
    build: Callable[[Mapping[str, nn.Parameter], Any, Meshes], torch.optim.Optimizer]
