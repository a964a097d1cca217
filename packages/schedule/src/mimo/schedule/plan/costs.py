"""What a step costs: seconds of each computation, bytes of what it keeps and sends, and how fast links are.

Numbers may be of any numeric type, fractions included: results are then exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from mimo.schedule.plan.plan import ActionKind
from mimo.topology import Edge, ModuleGraph, StageId


@attrs.frozen
class Seconds:
    """Time of a pass: ``fixed``, plus ``each`` for every microbatch."""

    fixed: float = 0
    each: float = 0

    def of(self, microbatches: float) -> float:
        """Return the seconds of a pass over so many microbatches."""
        return self.fixed + self.each * microbatches


NOTHING = Seconds()


@attrs.frozen(kw_only=True)
class StageCost:
    """What one stage costs on each rank that holds it.

    Args:
        forward: of the forward.
        input_gradient: of the first part of the backward, for which other stages wait.
        weight_gradient: of the second part; an unsplit backward takes both.
        recompute: of the recomputation before a backward, collectives included.
        reduce: seconds of the reduction of the stage's gradients over its ranks, once a step.
        reduce_tied: seconds of the reduction of a parameter that another stage holds too.
        activations: bytes saved of a microbatch from its forward to its backward.
        recomputed: further bytes that recomputation takes until that backward is done.
        weight_inputs: of both, the bytes that a split backward saves from its first part to its second.
        passing: further bytes that a forward takes while it runs, of a stage without backward.
    """

    forward: Seconds
    input_gradient: Seconds = NOTHING
    weight_gradient: Seconds = NOTHING
    recompute: Seconds = NOTHING
    reduce: float = 0
    reduce_tied: float = 0
    activations: int = 0
    recomputed: int = 0
    weight_inputs: int = 0
    passing: int = 0

    def seconds(self, kind: ActionKind, microbatches: float) -> float:
        """Return the time of a computation over so many average microbatches, or of the reduction."""
        match kind:
            case "forward":
                return self.forward.of(microbatches)
            case "backward":
                parts = (self.recompute, self.input_gradient, self.weight_gradient)
                return sum(part.of(microbatches) for part in parts)
            case "input-gradient":
                return self.recompute.of(microbatches) + self.input_gradient.of(microbatches)
            case "weight-gradient":
                return self.weight_gradient.of(microbatches)
            case "reduce":
                return self.reduce
        return 0


@attrs.frozen
class Link:
    """How messages of an edge travel: ``latency`` in seconds, ``bandwidth`` in bytes a second."""

    latency: float = 0
    bandwidth: float = float("inf")

    def seconds(self, size: float) -> float:
        """Return the time of a message of ``size`` bytes."""
        return self.latency + (size / self.bandwidth if self.bandwidth != float("inf") else 0)


@attrs.frozen(kw_only=True)
class Costs:
    """What a step over a graph costs.

    Args:
        stages: of every stage of the graph.
        message_bytes: of each edge by name, the bytes that a microbatch sends along it between the two ranks that
            exchange most; gradients are as many. An edge left out sends nothing.
        links: by edge name; ``link`` for all others.
        link: of edges that ``links`` leaves out.
        overlaps: whether messages travel while their ends compute. Where not, sending and receiving keep both busy.
        loads: by module, how much of what a microbatch costs on average each one does; 1 for all of a module left out.
    """

    stages: Mapping[StageId, StageCost]
    message_bytes: Mapping[str, int] = attrs.field(factory=dict)
    links: Mapping[str, Link] = attrs.field(factory=dict)
    link: Link = Link()
    overlaps: bool = True
    loads: Mapping[str, Sequence[float]] = attrs.field(factory=dict)

    @classmethod
    def even(
        cls, graph: ModuleGraph, *, forward: float = 1, input_gradient: float = 1, weight_gradient: float = 1
    ) -> Costs:
        """Return costs in which every stage takes the same time, messages take no time, and nothing is saved."""
        each = StageCost(
            forward=Seconds(each=forward),
            input_gradient=Seconds(each=input_gradient),
            weight_gradient=Seconds(each=weight_gradient),
        )
        return cls(stages=dict.fromkeys(graph.stages, each)).trained(graph)

    def trained(self, graph: ModuleGraph) -> Costs:
        """Return the costs without backwards of stages that run none, and without weight gradients of frozen stages."""

        def of(stage: StageId, cost: StageCost) -> StageCost:
            if not graph.runs_backward(stage):
                trained = attrs.evolve(cost, input_gradient=NOTHING, recompute=NOTHING, recomputed=0)
            elif graph.by_name[stage.module].trains[stage.stage]:
                return cost
            else:
                trained = cost
            return attrs.evolve(trained, weight_gradient=NOTHING, reduce=0, reduce_tied=0, weight_inputs=0)

        return attrs.evolve(self, stages={stage: of(stage, cost) for stage, cost in self.stages.items()})

    def seconds(self, kind: ActionKind, stage: StageId, microbatches: int) -> float:
        """Return the time of a computation or reduction of ``stage``."""
        return self.stages[stage].seconds(kind, microbatches)

    def load(self, module: str, microbatches: Sequence[int]) -> float:
        """Return as how many average microbatches these are; those of the next step count on from this step's."""
        own = self.loads.get(module)
        return len(microbatches) if own is None else sum(own[index % len(own)] for index in microbatches)

    def transfer(self, edge: str, microbatches: int = 1) -> float:
        """Return the time that a message of so many microbatches takes along an edge, either way."""
        size = self.message_bytes.get(edge, 0) * microbatches
        return self.links.get(edge, self.link).seconds(size) if size else 0

    def message(self, graph: ModuleGraph, edge: Edge, microbatches: int = 1) -> float:
        """Return the time of a message on an edge of ``graph``; 0 where all rows stay on their ranks.

        They stay if both ends have the same ranks in the same layout.
        """
        if graph.stage_ranks(edge.source) == graph.stage_ranks(edge.target):
            source, target = (graph.by_name[end.module].grid for end in (edge.source, edge.target))
            if (source.dp, source.cp, source.tp) == (target.dp, target.cp, target.tp):
                return 0
        return self.transfer(edge.name, microbatches)
