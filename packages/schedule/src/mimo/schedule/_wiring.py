"""What the checker must know of the graph, looked up once, so that checking stays linear in actions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import attrs

from mimo.schedule._plan import Action
from mimo.topology import Edge, ModuleGraph, StageId

Channel = tuple[str, StageId]
"""An edge and the stage that receives: every edge has one channel for rows and one for gradients."""


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
        found: dict[StageId, list[int]] = {stage: [] for stage in self.graph.stages}
        for number, actor in enumerate(self.graph.actors):
            for stage in actor.stages:
                found[stage].append(number)
        return {stage: tuple(numbers) for stage, numbers in found.items()}

    def trains(self, stage: StageId) -> bool:
        """Tell whether a parameter of ``stage`` is trained."""
        return self.graph.by_name[stage.module].trains[stage.stage]

    def tied_stages(self, module: str) -> tuple[StageId, ...]:
        """Return the two stages whose ranks add up the gradients of a shared parameter of ``module``, or none."""
        return tuple(StageId(module, stage) for stage in self.graph.by_name[module].tied_stages)

    def feeds(self, action: Action) -> tuple[Edge, ...]:
        """Return the edges on whose receives a computation waits; a weight gradient needs none anew."""
        if action.kind == "forward":
            return self.inputs[action.stage_id]
        if action.kind in ("backward", "input-gradient"):
            return tuple(edge for edge in self.outputs[action.stage_id] if edge.gradient)
        return ()

    def gathers(self, stage: StageId) -> bool:
        """Tell whether a computation of ``stage`` has collectives inside: tensor, context or expert ranks share it."""
        return self.graph.by_name[stage.module].meeting_size > 1

    def channel(self, message: Action) -> Channel:
        """Return the channel of a send or receive on a known edge."""
        assert message.edge is not None, message
        if message.kind == "receive":
            return (message.edge, message.stage_id)
        edge = self.edges[message.edge]
        return (message.edge, edge.target if message.stage_id == edge.source else edge.source)
