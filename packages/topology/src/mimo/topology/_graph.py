"""The module graph: modules with their grids, the edges between their stages, and what each rank does in it.

Edges say whether they carry gradient, decided once from what trains. Nothing here assumes a single sink.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Literal, NamedTuple

import attrs

from mimo.hooks import ConfigError
from mimo.topology._grid import Coordinates, Grid

Placement = Literal["loop", "v"]
"""How the chunks of a module go over its pipeline ranks: each from the first to the last, or to and fro."""
Overlap = Literal["sums", "gathers"]
"""What goes over data lanes while layers compute: sums of gradients, gathers of parameters."""
Feeds = Literal["first", "last"]
"""Which stage of the modules that it feeds takes a module's rows: the first, as an encoder's, or the last."""
Recompute = Literal["none", "selective", "full"]
"""What backward computes again instead of keeping it: nothing, what is cheap beside its memory, or every layer."""


@attrs.frozen(kw_only=True)
class Module:
    """A module in the graph.

    Its stages are numbered as data passes them. With several chunks a rank holds one stage of each, and stages count
    on from chunk to chunk: of ``pp`` 2 and ``chunks`` 2, stages 0 and 2 lie on the first pipeline rank in a loop, and
    0 and 3 in a V. An encoder that is divided at its seam has one stage more, its projector, on the ranks of the last
    stage of its tower; plans are made for a graph in which tower and projector are two modules
    (`ModuleGraph.divided`).

    Args:
        grid: its ranks; the module's name is the grid's.
        trains: for each stage, whether any of its parameters is trained.
        tied: the last stage holds a second copy of a parameter that stage 0 owns (tied embeddings).
        experts: it has a mixture of experts, which lies on the expert view of the grid.
        chunks: stages on each rank.
        placement: on which rank which.
        batch_factor: neighbouring microbatches that one pass serves.
        recompute: what its backward computes again, collectives included.
        prefetch: its rows of a step are made during the step before, so that nobody waits for them.
        gathers: its computations gather parameters over the data lanes, so that all ranks of a stage wait for each
            other inside.
        shard_lanes: neighbouring data lanes (``dp x cp``) over which a copy of its parameters is spread; 0 for all.
        overlaps: what of it goes over data lanes at any time while layers compute.
        seam: its last stage is the projector of an encoder whose tower works a step ahead, so that the others train
            nothing.
        projector_of: the module of which this one is the projector, in a graph that is divided; empty for all others.
        feeds: which stage of the modules that it feeds takes its rows.

    Raises:
        ConfigError: a count is below 1, ``shard_lanes`` does not divide the lanes, or what is made ahead of its step
            trains.
    """

    grid: Grid
    trains: tuple[bool, ...]
    tied: bool = False
    experts: bool = False
    chunks: int = 1
    placement: Placement = "loop"
    batch_factor: int = 1
    recompute: Recompute = "none"
    prefetch: bool = False
    gathers: bool = False
    shard_lanes: int = 1
    overlaps: frozenset[Overlap] = frozenset()
    seam: bool = False
    projector_of: str = ""
    feeds: Feeds = "first"

    def __attrs_post_init__(self) -> None:
        """Refuse counts below 1, a part of a lane, and to make ahead what a step would change."""
        for key, count in (("chunks", self.chunks), ("batch_factor", self.batch_factor)):
            if count < 1:
                raise ConfigError(f"modules.{self.name}.{key}", expected="1 or more", got=repr(count))
        assert len(self.trains) == self.stages, (self.name, self.trains)
        lanes = self.grid.dp * self.grid.cp
        if self.shard_lanes < 0 or (self.shard_lanes and lanes % self.shard_lanes):
            raise ConfigError(
                f"modules.{self.name}.optimizer.shard_lanes",
                expected=f"a divisor of its {lanes} data lanes (dp {self.grid.dp} x cp {self.grid.cp}), or 0 for all",
                got=repr(self.shard_lanes),
                fix=f"Set optimizer.shard_lanes, or that of modules.{self.name}.optimizer, to one that divides them.",
            )
        if self.prefetch and any(self.trains):
            raise _prefetch_refused(self.name, "a module of which nothing is trained", "one that trains", _FREEZE)

    @property
    def name(self) -> str:
        """The module's name."""
        return self.grid.name

    @property
    def stages(self) -> int:
        """Number of its stages."""
        return self.grid.pp * self.chunks + self.seam

    def pipeline_rank(self, stage: int) -> int:
        """Return the place along ``pp`` of the ranks that hold ``stage``."""
        if self.seam and stage == self.stages - 1:
            stage -= 1
        return self._turned(*divmod(stage, self.grid.pp))

    def _turned(self, chunk: int, place: int) -> int:
        """Return a place along ``pp``, counted from the other end in chunks that lead back."""
        return self.grid.pp - 1 - place if self.placement == "v" and chunk % 2 else place

    def stage_ranks(self, stage: int) -> tuple[int, ...]:
        """Return the ranks that hold ``stage``, ascending."""
        return self.grid.stage_ranks(self.pipeline_rank(stage))

    def stages_at(self, pipeline_rank: int) -> tuple[int, ...]:
        """Return the stages at a place along ``pp``, one of each chunk."""
        held = [chunk * self.grid.pp + self._turned(chunk, pipeline_rank) for chunk in range(self.chunks)]
        if self.seam and held[-1] == self.stages - 2:
            held.append(self.stages - 1)
        return tuple(held)

    @property
    def tied_stages(self) -> tuple[int, ...]:
        """The two stages whose ranks hold copies of one parameter and must add up its gradients, or none."""
        last = self.stages - 1
        if not self.tied or self.pipeline_rank(0) == self.pipeline_rank(last):
            return ()
        return (0, last) if self.trains[0] and self.trains[last] else ()

    def divided(self) -> tuple[Module, ...]:
        """Return the module as plans see it: where it has a seam its tower, which works ahead, and its projector.

        Both have its name, the projector's with ``.projector`` behind it, which no module of a user can have.
        """
        if not self.seam:
            return (self,)
        stages = self.stages - 1
        grid = attrs.evolve(self.grid, name=f"{self.name}.projector", ranks=self.stage_ranks(stages), pp=1)
        projector = attrs.evolve(
            self, grid=grid, trains=self.trains[stages:], chunks=1, seam=False, projector_of=self.name
        )
        tower = attrs.evolve(
            self, trains=self.trains[:stages], recompute="none", prefetch=True, seam=False, feeds="first"
        )
        return tower, projector

    def passes(self, microbatches: int) -> tuple[tuple[int, ...], ...]:
        """Return the microbatches of a step as its passes take them: ``batch_factor`` at once, the rest in the last."""
        each = self.batch_factor
        return tuple(tuple(range(first, min(first + each, microbatches))) for first in range(0, microbatches, each))

    def first(self, microbatches: int) -> int:
        """Return the first microbatch that its passes serve in a step of so many.

        Those of the next step are counted on from those of this one: with ``prefetch`` they are what it works on.
        """
        return microbatches if self.prefetch else 0

    @property
    def meeting_size(self) -> int:
        """How many neighbouring ranks of a stage wait for each other inside each of its computations.

        The context and tensor ranks of a lane do, and the ranks that share all experts; where groups of the two kinds
        overlap, all that they link. All do where parameters are gathered over the data lanes.
        """
        grid = self.grid
        if self.gathers:
            return grid.dp * grid.cp * grid.tp
        return math.lcm(grid.cp * grid.tp, grid.ep * grid.etp if self.experts else 1)


class StageId(NamedTuple):
    """One stage of one module; a plain tuple, as plans look millions of them up."""

    module: str
    stage: int


@attrs.frozen(kw_only=True)
class Edge:
    """An arrow between two stages: of two modules (a boundary), or of one module's neighbouring stages."""

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
    """What one rank is in every module that it belongs to.

    Args:
        rank: which.
        places: where it stands in each module's grid.
        stages: those that it runs, in the order of modules and stages.
    """

    rank: int
    places: Mapping[str, Coordinates]
    stages: tuple[StageId, ...]


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
        arrows: pairs ``(source module, target module)``; the last stage of the source feeds that stage of the target
            which the source's ``feeds`` names.

    Raises:
        ConfigError: names repeat, an arrow names no module, the arrows form a circle, or a module is to work ahead of
            its step on what is not there by then, or for nobody.
    """

    modules: tuple[Module, ...]
    arrows: tuple[tuple[str, str], ...]

    def __attrs_post_init__(self) -> None:
        """Refuse repeated names, unknown ends, circles, and work ahead that can't be."""
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
        for module in self.modules:
            if module.prefetch:
                self._check_prefetch(module.name)

    def _check_prefetch(self, name: str) -> None:
        for source in self.order:
            if (source, name) in self.arrows and not self.by_name[source].prefetch:
                trains = any(self.runs_backward(StageId(source, stage)) for stage in range(self.by_name[source].stages))
                raise _prefetch_refused(
                    name,
                    "that what feeds it is made ahead too",
                    f"{source}, which trains" if trains else f"{source}, whose rows are made in their own step",
                    "" if trains else f"Set modules.{source}.prefetch = true too, or leave this one out.",
                )
        if all(source != name for source, _ in self.arrows):
            raise _prefetch_refused(name, "a module that feeds another one", "one that feeds none", "")

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
        return tuple(StageId(name, stage) for name in self.order for stage in range(self.by_name[name].stages))

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """All edges between stages, sources first."""
        edges: list[Edge] = []
        below: dict[StageId, bool] = {}  # does anything at or before this stage train?
        for stage in self.stages:
            into = [
                (StageId(source, self.by_name[source].stages - 1), f"{source}->{target}")
                for source, target in self.arrows
                if self.fed_stage(source, target) == stage
            ]
            if stage.stage > 0:
                before = StageId(stage.module, stage.stage - 1)
                into.insert(0, (before, f"{stage.module}.{before.stage}-{stage.stage}"))
            found = [Edge(name=name, source=source, target=stage, gradient=below[source]) for source, name in into]
            below[stage] = self.by_name[stage.module].trains[stage.stage] or any(edge.gradient for edge in found)
            edges += found
        return tuple(edges)

    def fed_stage(self, source: str, target: str) -> StageId:
        """Return the stage of ``target`` that takes the rows of ``source``, which feeds it."""
        last = self.by_name[target].stages - 1
        return StageId(target, last if self.by_name[source].feeds == "last" else 0)

    def inputs(self, stage: StageId) -> tuple[Edge, ...]:
        """Return the edges into ``stage``."""
        return self._ends[0].get(stage, ())

    def outputs(self, stage: StageId) -> tuple[Edge, ...]:
        """Return the edges out of ``stage``."""
        return self._ends[1].get(stage, ())

    @cached_property
    def _ends(self) -> tuple[dict[StageId, tuple[Edge, ...]], dict[StageId, tuple[Edge, ...]]]:
        """Edges by target, and by source."""
        into: dict[StageId, tuple[Edge, ...]] = {}
        out: dict[StageId, tuple[Edge, ...]] = {}
        for edge in self.edges:
            into[edge.target] = (*into.get(edge.target, ()), edge)
            out[edge.source] = (*out.get(edge.source, ()), edge)
        return into, out

    def runs_backward(self, stage: StageId) -> bool:
        """Return whether ``stage`` has a backward: it trains, or something that feeds it does."""
        return self.by_name[stage.module].trains[stage.stage] or any(edge.gradient for edge in self.inputs(stage))

    def role(self, rank: int) -> RankRole:
        """Return what ``rank`` is in each of its modules; a rank in a gap has no places."""
        held = [module for module in self.modules if rank in module.grid]
        places = {module.name: module.grid.coordinates(rank) for module in held}
        return RankRole(
            rank=rank,
            places=places,
            stages=tuple(
                StageId(module.name, stage) for module in held for stage in module.stages_at(places[module.name].pp)
            ),
        )

    def stage_ranks(self, stage: StageId) -> tuple[int, ...]:
        """Return the ranks that hold ``stage``, ascending."""
        return self.by_name[stage.module].stage_ranks(stage.stage)

    @cached_property
    def actors(self) -> tuple[Actor, ...]:
        """Ranks grouped by what they run, ordered by their lowest rank."""
        held: dict[int, tuple[StageId, ...]] = {}
        for module in self.modules:
            for stage in range(module.stages):
                name = (StageId(module.name, stage),)
                for rank in module.stage_ranks(stage):
                    held[rank] = held.get(rank, ()) + name
        found: dict[tuple[StageId, ...], list[int]] = {}
        for rank in self.ranks:
            found.setdefault(held[rank], []).append(rank)
        return tuple(Actor(ranks=tuple(ranks), stages=stages) for stages, ranks in found.items())

    def divided(self) -> ModuleGraph:
        """Return the graph that plans are made for: each module with a seam as two, its tower before its projector.

        What the module feeds, its projector does. A graph without a seam is returned as it is.
        """
        if not any(module.seam for module in self.modules):
            return self
        parts = {module.name: module.divided() for module in self.modules}
        within = tuple((tower.name, rest.name) for tower, *behind in parts.values() for rest in behind)
        return attrs.evolve(
            self,
            modules=tuple(part for found in parts.values() for part in found),
            arrows=(*within, *((parts[source][-1].name, target) for source, target in self.arrows)),
        )

    def without_training(self) -> ModuleGraph:
        """Return the same graph with everything frozen and in its own step, as evaluation runs it."""
        return attrs.evolve(
            self,
            modules=tuple(
                attrs.evolve(module, trains=(False,) * module.stages, prefetch=False) for module in self.modules
            ),
        )


_FREEZE = "Freeze all of it, or leave this out: what a step changes can't be used before it."


def _prefetch_refused(name: str, expected: str, got: str, fix: str) -> ConfigError:
    return ConfigError(f"modules.{name}.prefetch", expected=expected, got=got, fix=fix or "Leave it out.")
