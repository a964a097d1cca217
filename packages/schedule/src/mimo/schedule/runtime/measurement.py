"""The timeline of a measured step, from the records of the ranks, with the cause of each wait."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mimo.schedule.plan import Action, Bar, Timeline
from mimo.schedule.runtime.record import Moment
from mimo.topology import ModuleGraph, StageId

_MESSAGES = ("send", "receive")
_WorkKey = tuple[bool, StageId, int]
"""Whether it is a backward that others wait for, else a forward; of which stage and microbatch."""


def measured(name: str, graph: ModuleGraph, ranks: Sequence[int], moments: Mapping[int, Sequence[Moment]]) -> Timeline:
    """Return the timeline of a step from what its ranks recorded.

    A computation begins when all its inputs are there. The gap before it is waiting: for the module that made its rows
    or gradients, if that module still worked when the rank had ended its last action, and otherwise for the transfer,
    which includes sending earlier results.

    Args:
        name: of the timeline.
        graph: for which the plan was made.
        ranks: all of the world, ascending.
        moments: by rank, on one clock; the first of all is the beginning of the step.
    """
    ends: dict[_WorkKey, float] = {}
    for done in moments.values():
        for moment in done:
            for work in _gives(moment.action):
                ends[work] = max(ends.get(work, 0.0), moment.ended)
    zero = min((moment.began for done in moments.values() for moment in done), default=0.0)
    bars = [bar for rank, done in sorted(moments.items()) for bar in _bars(graph, rank, done, ends, zero)]
    return Timeline(name=name, ranks=tuple(ranks), bars=tuple(bars))


def _gives(action: Action) -> Iterator[_WorkKey]:
    """Yield the results of an action that others may wait for."""
    if action.kind in ("forward", "backward", "input-gradient"):
        for microbatch in action.microbatches:
            yield action.kind != "forward", action.stage_id, microbatch


def _takes(graph: ModuleGraph, action: Action) -> Iterator[_WorkKey]:
    """Yield the results that an action waits for."""
    if action.kind == "forward":
        stages = [edge.source for edge in graph.inputs(action.stage_id)]
    elif action.kind in ("backward", "input-gradient"):
        stages = [edge.target for edge in graph.outputs(action.stage_id) if edge.gradient]
    else:
        return
    for stage in stages:
        for microbatch in action.microbatches:
            yield action.kind != "forward", stage, microbatch


def _bars(
    graph: ModuleGraph, rank: int, moments: Sequence[Moment], ends: Mapping[_WorkKey, float], zero: float
) -> Iterator[Bar]:
    free, cause = zero, "warm-up"
    for moment in moments:
        if moment.action.kind in _MESSAGES:
            continue
        if cause != "warm-up":
            late = max(((ends.get(work, 0.0), work[1].module) for work in _takes(graph, moment.action)), default=None)
            cause = late[1] if late is not None and late[0] > free else "transfer"
        waited = max(moment.ready - free, 0.0)
        yield Bar(
            ranks=(rank,),
            action=moment.action,
            start=moment.ready - zero,
            finish=moment.ended - zero,
            waited=waited,
            cause=cause if waited else "",
        )
        free, cause = moment.ended, ""
