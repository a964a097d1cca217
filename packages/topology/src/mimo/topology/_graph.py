"""The module graph: modules with their grids, the edges between their stages, and what each rank does in it.

Edges say whether they carry gradient, decided once from what trains. Nothing here assumes a single sink.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

import attrs

from mimo.hooks import ConfigError
from mimo.topology._grid import Coordinates, Grid


@attrs.frozen(kw_only=True)
class Module:
    """A module in the graph.

    Args:
        grid: its ranks; the module's name is the grid's.
        trains: for each pipeline stage, whether any of its parameters is trained.
        tied: the last stage holds a second copy of a parameter that stage 0 owns (tied embeddings).
        experts: it has a mixture of experts, which lies on the expert view of the grid.
    """

    grid: Grid
    trains: tuple[bool, ...] = attrs.field()
    tied: bool = False
    experts: bool = False

    @trains.validator
    def _one_a_stage(self, _attribute: attrs.Attribute[tuple[bool, ...]], trains: tuple[bool, ...]) -> None:
        assert len(trains) == self.grid.pp, (self.grid.name, trains)

    @property
    def name(self) -> str:
        """The module's name."""
        return self.grid.name

    @property
    def meeting_size(self) -> int:
        """How many neighbouring ranks of a stage wait for each other inside each of its computations.

        The context and tensor ranks of a lane do, and the ranks that share all experts; where groups of the two kinds
        overlap, all that they link.
        """
        grid = self.grid
        return math.lcm(grid.cp * grid.tp, grid.ep * grid.etp if self.experts else 1)


@attrs.frozen(order=True)
class StageId:
    """One pipeline stage of one module."""

    module: str
    stage: int


@attrs.frozen(kw_only=True)
class Edge:
    """An arrow between two stages: of two modules (a boundary), or of one module's neighbouring pipeline stages."""

    name: str
    source: StageId
    target: StageId
    gradient: bool

    @property
    def is_boundary(self) -> bool:
        """Whether it joins two modules."""
        return self.source.module != self.target.module


@attrs.frozen(kw_only=True)
class RankRole:
    """What one rank is in every module that it belongs to."""

    rank: int
    places: Mapping[str, Coordinates]

    @property
    def stages(self) -> tuple[StageId, ...]:
        """The stages that this rank runs, in the graph's module order."""
        return tuple(StageId(module, place.pp) for module, place in self.places.items())


@attrs.frozen(kw_only=True)
class Actor:
    """Ranks with the same role in every module; they share one list of actions."""

    ranks: tuple[int, ...]
    stages: tuple[StageId, ...]


@attrs.frozen(kw_only=True)
class ModuleGraph:
    """Modules and the arrows between them; always a DAG.

    Args:
        modules: in the order in which they are named everywhere.
        arrows: pairs ``(source module, target module)``; the last stage of the source feeds stage 0 of the target.

    Raises:
        ConfigError: names repeat, an arrow names no module, or the arrows form a circle.
    """

    modules: tuple[Module, ...]
    arrows: tuple[tuple[str, str], ...]

    def __attrs_post_init__(self) -> None:
        """Refuse repeated names, unknown ends and circles."""
        names = [module.name for module in self.modules]
        if len(set(names)) != len(names):
            raise ConfigError("modules", expected="distinct names", got=repr(names))
        for arrow in self.arrows:
            for end in arrow:
                if end not in names:
                    raise ConfigError("modules", expected=f"an edge between modules of {names}", got=repr(arrow))
        if len(set(self.arrows)) != len(self.arrows):
            raise ConfigError("modules", expected="each edge once", got=repr(self.arrows))
        try:
            _ = self.order
        except CycleError as error:
            circle = " -> ".join(error.args[1])
            raise ConfigError("modules", expected="edges without a circle", got=circle) from error

    @cached_property
    def by_name(self) -> Mapping[str, Module]:
        """Modules by name."""
        return {module.name: module for module in self.modules}

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Module names, every source before its targets."""
        sorter = TopologicalSorter({module.name: [] for module in self.modules})
        for source, target in self.arrows:
            sorter.add(target, source)
        return tuple(sorter.static_order())

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that holds a module, ascending."""
        return tuple(sorted({rank for module in self.modules for rank in module.grid.ranks}))

    @cached_property
    def stages(self) -> tuple[StageId, ...]:
        """All stages, every source before its targets."""
        return tuple(StageId(name, stage) for name in self.order for stage in range(self.by_name[name].grid.pp))

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """All edges between stages, sources first."""
        edges: list[Edge] = []
        below: dict[StageId, bool] = {}  # does anything at or before this stage train?
        for stage in self.stages:
            into = [(StageId(stage.module, stage.stage - 1), f"{stage.module}.{stage.stage - 1}-{stage.stage}")]
            if stage.stage == 0:
                into = [
                    (StageId(source, self.by_name[source].grid.pp - 1), f"{source}->{target}")
                    for source, target in self.arrows
                    if target == stage.module
                ]
            found = [Edge(name=name, source=source, target=stage, gradient=below[source]) for source, name in into]
            below[stage] = self.by_name[stage.module].trains[stage.stage] or any(edge.gradient for edge in found)
            edges += found
        return tuple(edges)

    def inputs(self, stage: StageId) -> tuple[Edge, ...]:
        """Return the edges into ``stage``."""
        return tuple(edge for edge in self.edges if edge.target == stage)

    def outputs(self, stage: StageId) -> tuple[Edge, ...]:
        """Return the edges out of ``stage``."""
        return tuple(edge for edge in self.edges if edge.source == stage)

    def runs_backward(self, stage: StageId) -> bool:
        """Tell whether ``stage`` has a backward: it trains, or something that feeds it does."""
        return self.by_name[stage.module].trains[stage.stage] or any(edge.gradient for edge in self.inputs(stage))

    def role(self, rank: int) -> RankRole:
        """Return what ``rank`` is in each of its modules; a rank in a gap has no places."""
        return RankRole(
            rank=rank,
            places={module.name: module.grid.coordinates(rank) for module in self.modules if rank in module.grid},
        )

    @cached_property
    def actors(self) -> tuple[Actor, ...]:
        """Ranks grouped by what they run, ordered by their lowest rank."""
        held: dict[int, tuple[StageId, ...]] = {}
        for module in self.modules:
            for stage in range(module.grid.pp):
                name = (StageId(module.name, stage),)
                for rank in module.grid.stage_ranks(stage):
                    held[rank] = held.get(rank, ()) + name
        found: dict[tuple[StageId, ...], list[int]] = {}
        for rank in self.ranks:
            found.setdefault(held[rank], []).append(rank)
        return tuple(Actor(ranks=tuple(ranks), stages=stages) for stages, ranks in found.items())

    def without_training(self) -> ModuleGraph:
        """Return the same graph with everything frozen, as evaluation runs it."""
        return attrs.evolve(
            self, modules=tuple(attrs.evolve(module, trains=(False,) * module.grid.pp) for module in self.modules)
        )
