"""Plans of the schedules with a name: the orders that it stands for where a module is a pipeline, bounds elsewhere.

A stage must be ahead of each stage that it feeds by what that one keeps in flight, and by a pass of its own. Then
nobody waits in a circle, whatever the sizes of passes: what a consumer wants before it can give a gradient back, its
source may have begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import attrs

from mimo.hooks import ConfigError
from mimo.schedule.plan import Plan, Wiring, assemble, stages_to_sink
from mimo.schedule.schedules.demands import trains
from mimo.schedule.schedules.list_schedule import ListRules, PipelineRank, list_schedule, units
from mimo.schedule.schedules.list_state import Pass
from mimo.schedule.schedules.orders import PassIndex
from mimo.topology import Module, ModuleGraph, StageId


@attrs.frozen(kw_only=True)
class Pipeline:
    """A module as an order sees it.

    Args:
        module: which.
        passes: in the step.
        lead: by how many passes its last stage must be ahead of the modules that it feeds; 0 if it feeds none.
    """

    module: Module
    passes: int
    lead: int


_PROJECTOR = 1 / 16
"""What a pass of a projector takes of the time of one of its tower."""

OrderOf = Callable[[int], Iterable[PassIndex]]
"""Of a place along a pipeline the order of its ranks, as if all its stages trained."""
MakeOrder = Callable[[Pipeline], OrderOf | None]


def planned(schedule: str, graph: ModuleGraph, microbatches: int, make: MakeOrder) -> Plan:
    """Return the plan of a step in which modules keep to the orders that ``make`` gives them, and others to bounds.

    Where nothing trains there are forwards alone, and nothing to order.

    Raises:
        ConfigError: there is no microbatch.
    """
    if microbatches < 1:
        raise ConfigError("microbatches", expected="1 or more in a step", got=repr(microbatches))
    rules = rules_of(graph, microbatches, make if trains(graph) else unordered)
    return assemble(schedule, graph, microbatches, list_schedule(graph, microbatches, rules))


def unordered(_pipeline: Pipeline) -> None:
    """Leave the order of a module to bounds."""


def rules_of(graph: ModuleGraph, microbatches: int, make: MakeOrder = unordered) -> ListRules:
    """Return the rules by which the modules that ``make`` has orders for keep to them, and others to bounds.

    The bound of a stage is the number of stages on the longest path from it to a sink, itself included, where every
    pass serves one microbatch: as many keep the path busy, and more would only cost memory. So are ranks of a pipeline
    bounded that run no backward, since an order without one would have them do all their forwards at once.
    """
    wiring = Wiring(graph=graph)
    ahead: dict[StageId, int] = {}
    orders: dict[PipelineRank, Sequence[Pass]] = {}
    for name in reversed(graph.order):
        module = graph.by_name[name]
        each, passes = module.batch_factor, module.passes(microbatches)
        lead = _lead(graph, module, ahead)
        order_of = make(Pipeline(module=module, passes=len(passes), lead=-(-lead // each)))
        for place in range(module.grid.pp):
            runs_backward = any(StageId(name, at) in wiring.backward for at in module.stages_at(place))
            if order_of is not None and runs_backward:
                steps = list(order_of(place))
                orders[PipelineRank(name, place)] = [
                    Pass(step.kind, StageId(name, step.stage), passes[step.number])
                    for step in _trimmed(module, steps, wiring)
                ]
                ahead |= {StageId(name, at): each * _ahead(steps, at) for at in module.stages_at(place)}
        for at in reversed(range(module.stages)):
            lead = ahead.setdefault(StageId(name, at), each * (1 + -(-lead // each)))
    return ListRules(priority=soonest_free(graph), orders=orders, bounds=ahead, seconds=_seconds(graph))


def _seconds(graph: ModuleGraph) -> Callable[[Pass], float]:
    """Return the time of passes: units, of which a projector beside its tower takes a small part."""
    small = {module.name for module in graph.modules if module.projector_of}
    if not small:
        return units
    return lambda wanted: units(wanted) * (_PROJECTOR if wanted.stage.module in small else 1)


def _lead(graph: ModuleGraph, module: Module, ahead: Mapping[StageId, int]) -> int:
    """Return by how many microbatches the last stage of a module must be ahead of those that it feeds; 0 of none.

    Where these take fewer at once, gradients of the first of a pass wait there for those of its last.
    """
    found = [graph.by_name[target] for source, target in graph.arrows if source == module.name]
    targets = [target for target in found if target.prefetch == module.prefetch]
    return max(
        (ahead[StageId(target.name, 0)] + max(0, module.batch_factor - target.batch_factor) for target in targets),
        default=0,
    )


def _ahead(steps: Sequence[PassIndex], stage: int) -> int:
    """Return how many passes a stage is ahead, at most, of its next (input) gradient when that is about to begin."""
    forwards = backwards = most = 0
    for step in steps:
        if step.stage == stage:
            if step.kind == "forward":
                forwards += 1
            elif step.kind != "weight-gradient":
                most = max(most, forwards - backwards)
                backwards += 1
    return most


def _trimmed(module: Module, steps: Sequence[PassIndex], wiring: Wiring) -> Iterator[PassIndex]:
    """Yield the steps of an order without what their stages have not to do, with backwards whole where that serves.

    It does where nothing trains, so that there is no weight gradient; and where nobody waits for the input gradients
    and each is followed at once by its weight gradient.
    """
    whole = {
        at for at in range(module.stages) if not module.trains[at] or _is_whole(StageId(module.name, at), steps, wiring)
    }
    for step in steps:
        if step.kind == "forward":
            yield step
        elif StageId(module.name, step.stage) in wiring.backward:
            if step.stage not in whole:
                yield step
            elif step.kind != "weight-gradient":
                yield step._replace(kind="backward")


def _is_whole(stage: StageId, steps: Sequence[PassIndex], wiring: Wiring) -> bool:
    if any(edge.gradient for edge in wiring.inputs[stage]):
        return False
    behind = zip(steps, (*steps[1:], None), strict=True)
    return all(
        then == step._replace(kind="weight-gradient")
        for step, then in behind
        if step.stage == stage.stage and step.kind == "input-gradient"
    )


def soonest_free(graph: ModuleGraph) -> Callable[[Pass], tuple[int, ...]]:
    """Return the priority of passes by which what frees memory soonest goes first.

    That is gradients before rows before weights; of rows those that are due soonest, given that a stage is to be ahead
    of the sink by its distance from it; then the lowest microbatch, then the stage nearer to the sink. What is made for
    the next step goes last.
    """
    distance = stages_to_sink(graph)
    number = {stage: number for number, stage in enumerate(graph.stages)}

    def key(wanted: Pass) -> tuple[int, ...]:
        first, far = wanted.microbatches[0], distance[wanted.stage]
        if graph.by_name[wanted.stage.module].prefetch:
            return (3, first, 0, far, number[wanted.stage])
        if wanted.kind == "forward":
            return (1, first - far, first, far, number[wanted.stage])
        return (2 if wanted.kind == "weight-gradient" else 0, first, 0, far, number[wanted.stage])

    return key
