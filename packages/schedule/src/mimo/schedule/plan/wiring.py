"""Look-up tables of a module graph, made once, so that work on a plan stays linear in its actions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import attrs

from mimo.schedule.plan.plan import Action, ActionKind
from mimo.topology import Edge, ModuleGraph, StageId


@attrs.frozen(kw_only=True)
class Wiring:
    """Edges and holders of each stage; actors are numbered as in ``graph.actors``."""

    graph: ModuleGraph

    @cached_property
    def edges(self) -> Mapping[str, Edge]:
        """Edges by name."""
        return {edge.name: edge for edge in self.graph.edges}

    @cached_property
    def inputs(self) -> Mapping[StageId, tuple[Edge, ...]]:
        """Edges into each stage."""
        return {stage: self.graph.inputs(stage) for stage in self.graph.stages}

    @cached_property
    def outputs(self) -> Mapping[StageId, tuple[Edge, ...]]:
        """Edges out of each stage."""
        return {stage: self.graph.outputs(stage) for stage in self.graph.stages}

    @cached_property
    def backward(self) -> frozenset[StageId]:
        """Stages that run a backward."""
        return frozenset(stage for stage in self.graph.stages if self.graph.runs_backward(stage))

    @cached_property
    def holders(self) -> Mapping[StageId, tuple[int, ...]]:
        """Actors that hold each stage."""
        holders: dict[StageId, list[int]] = {stage: [] for stage in self.graph.stages}
        for number, actor in enumerate(self.graph.actors):
            for stage in actor.stages:
                holders[stage].append(number)
        return {stage: tuple(numbers) for stage, numbers in holders.items()}

    def trains(self, stage: StageId) -> bool:
        """Return whether a parameter of ``stage`` is trained."""
        return self.graph.by_name[stage.module].trains[stage.stage]

    def tied_stages(self, module: str) -> tuple[StageId, ...]:
        """Return the two stages whose ranks add up the gradients of a shared parameter of ``module``, or none."""
        return tuple(StageId(module, stage) for stage in self.graph.by_name[module].tied_stages)

    @cached_property
    def targets(self) -> Mapping[str, StageId]:
        """Target of each edge, by its name."""
        return {edge.name: edge.target for edge in self.graph.edges}

    @cached_property
    def feeding(self) -> Mapping[tuple[ActionKind, str, int], tuple[tuple[str, bool], ...]]:
        """By kind and stage of a computation the edges on whose receives it waits, and whether they carry gradients.

        A weight gradient waits for no receive, so it is left out.
        """
        feeding: dict[tuple[ActionKind, str, int], tuple[tuple[str, bool], ...]] = {}
        for stage in self.graph.stages:
            feeding["forward", stage.module, stage.stage] = tuple((edge.name, False) for edge in self.inputs[stage])
            gradients = tuple((edge.name, True) for edge in self.outputs[stage] if edge.gradient)
            feeding["backward", stage.module, stage.stage] = gradients
            feeding["input-gradient", stage.module, stage.stage] = gradients
        return feeding

    def first(self, stage: StageId, microbatches: int) -> int:
        """Return the first microbatch that a stage computes in a step of so many; the others follow it."""
        return self.graph.by_name[stage.module].first(microbatches)

    def passes(self, module: str, microbatches: int) -> tuple[tuple[int, ...], ...]:
        """Return the microbatches that a module's passes compute in a step."""
        passes, first = self.graph.by_name[module].passes(microbatches), self.graph.by_name[module].first(microbatches)
        return tuple(tuple(first + microbatch for microbatch in served) for served in passes) if first else passes

    def is_handed_on(self, edge: Edge) -> bool:
        """Return whether an edge moves what the step before made; all others move what this one makes."""
        source, target = (self.graph.by_name[end.module].prefetch for end in (edge.source, edge.target))
        return source and not target

    def gathers(self, action: Action) -> bool:
        """Return whether a computation has collectives inside: tensor, context or expert ranks share it.

        A weight gradient multiplies what its input gradient saved; it has collectives only where data lanes share the
        gradients that it completes. Recomputation and its collectives are part of the backward, or of the input
        gradient where the backward is split.
        """
        module = self.graph.by_name[action.module]
        if action.kind == "weight-gradient":
            return module.gathers and module.meeting_size > 1
        return action.kind in ("forward", "backward", "input-gradient") and module.meeting_size > 1

    def meeting(self, stage: StageId, actor: int) -> tuple[int, ...]:
        """Return the actors that an actor meets inside the computations of ``stage``, itself included."""
        return self._meeting_of[stage, actor]

    @cached_property
    def _meeting_of(self) -> Mapping[tuple[StageId, int], tuple[int, ...]]:
        return {
            (stage, actor): actors for stage, groups in self.meetings.items() for actors in groups for actor in actors
        }

    @cached_property
    def meetings(self) -> Mapping[StageId, tuple[tuple[int, ...], ...]]:
        """Actors of each stage, grouped by the collectives inside it; an actor without any is its own group."""
        numbers = {rank: number for number, actor in enumerate(self.graph.actors) for rank in actor.ranks}
        meetings = {}
        for stage, holders in self.holders.items():
            ranks, size = self.graph.stage_ranks(stage), self.graph.by_name[stage.module].meeting_size
            groups = {number: {number} for number in holders}
            for first in range(0, len(ranks), size):
                met = set().union(*(groups[numbers[rank]] for rank in ranks[first : first + size]))
                groups |= dict.fromkeys(met, met)
            meetings[stage] = tuple(sorted({tuple(sorted(group)) for group in groups.values()}))
        return meetings
