"""The order in which every step can be done: microbatch by microbatch, each with the passes that it needs.

The turn of a microbatch does the forwards of every stage that its consumers need, whose passes may have more
microbatches than its own; then the backwards of every stage that the gradients of its consumers allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from mimo.topology import ModuleGraph, StageId


@attrs.frozen(kw_only=True, eq=False)
class Turns:
    """The progress of a stage before the turn of each microbatch, and after the last: in microbatches of whole passes.

    Args:
        begun: the number of microbatches whose forward is done.
        ended: the number whose backward is done; equal to ``begun`` if the stage has no backward.
    """

    begun: Sequence[int]
    ended: Sequence[int]

    @property
    def max_in_flight(self) -> int:
        """The most microbatches in flight at one time."""
        return max(after - before for after, before in zip(self.begun[1:], self.ended[:-1], strict=True))


def turns_of(graph: ModuleGraph, microbatches: int) -> Mapping[StageId, Turns]:
    """Return the progress of each stage when a step is done in turns; nobody waits for rows of the next step."""
    numbers = range(microbatches + 1)
    begun: dict[StageId, list[int]] = {}
    ended: dict[StageId, list[int]] = {}
    for stage in reversed(graph.stages):  # its consumers come first
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
