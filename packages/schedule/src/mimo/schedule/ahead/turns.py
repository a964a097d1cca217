"""The order in which a step can always be done: microbatch by microbatch, each with all that passes demand of it.

A microbatch's turn takes every stage's forwards as far as the stages that it feeds need them to do theirs, whose passes
may serve more microbatches than its own; then every stage's backwards as far as the gradients of those stages allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from mimo.topology import ModuleGraph, StageId


@attrs.frozen(kw_only=True, eq=False)
class Turns:
    """How far a stage is before the turn of each microbatch, and after the last: whole passes, in microbatches.

    Args:
        begun: of how many microbatches it has done the forward.
        ended: of how many it has done the backward; where it has none, as many.
    """

    begun: Sequence[int]
    ended: Sequence[int]

    @property
    def most(self) -> int:
        """The most microbatches that are in flight at once."""
        return max(after - before for after, before in zip(self.begun[1:], self.ended[:-1], strict=True))


def turns_of(graph: ModuleGraph, microbatches: int) -> Mapping[StageId, Turns]:
    """Return how far each stage is when a step is done in turns; rows for the next step are waited for by nobody."""
    numbers = range(microbatches + 1)
    begun: dict[StageId, list[int]] = {}
    ended: dict[StageId, list[int]] = {}
    for stage in reversed(graph.stages):  # what it feeds comes first
        each = graph.by_name[stage.module].batch_factor
        now = [edge for edge in graph.outputs(stage) if not _is_handed_on(graph, edge.source, edge.target)]
        wanted = [max((begun[edge.target][number] for edge in now), default=number) for number in numbers]
        begun[stage] = [min(-(-count // each) * each, microbatches) for count in wanted]
        ended[stage] = begun[stage]
        gradients = [ended[edge.target] for edge in now if edge.gradient]
        if gradients:
            come = [min(counts) for counts in zip(*gradients, strict=True)]
            ended[stage] = [count if count == microbatches else count // each * each for count in come]
    return {stage: Turns(begun=begun[stage], ended=ended[stage]) for stage in graph.stages}


def _is_handed_on(graph: ModuleGraph, source: StageId, target: StageId) -> bool:
    return graph.by_name[source.module].prefetch and not graph.by_name[target.module].prefetch
