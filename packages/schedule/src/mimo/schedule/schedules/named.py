"""Plans of the schedules with fixed orders: modules that are pipelines keep to an order, other modules to bounds.

A stage must be ahead of each stage that it feeds by that stage's microbatches in flight, and by one pass of its own.
Then nobody waits in a circle, whatever the sizes of passes: a source may begin everything that its consumer needs
before the consumer returns a gradient.
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
    """The facts about a module that an order depends on.

    Args:
        module: which.
        passes: number of its passes in a step.
        lead: by how many passes its last stage must be ahead of the modules that it feeds; 0 if it feeds none.
    """

    module: Module
    passes: int
    lead: int


_PROJECTOR = 1 / 16
"""Time of a projector's pass, relative to a pass of its tower."""

OrderOf = Callable[[int], Iterable[PassIndex]]
"""Returns the order of the ranks at a place along a pipeline, as if all its stages trained."""
MakeOrder = Callable[[Pipeline], OrderOf | None]


def planned(schedule: str, graph: ModuleGraph, microbatches: int, make: MakeOrder) -> Plan:
    """Return the plan of a step: modules keep to the orders that ``make`` returns for them, other modules to bounds.

    If nothing trains there are only forwards, and nothing to order.

    Raises:
        ConfigError: there is no microbatch.
    """
    if microbatches < 1:
        raise ConfigError("microbatches", expected="1 or more in a step", got=repr(microbatches))
    rules = rules_of(graph, microbatches, make if trains(graph) else unordered)
    return assemble(schedule, graph, microbatches, list_schedule(graph, microbatches, rules))


def unordered(_pipeline: Pipeline) -> None:
    """Return no order: bounds alone hold the module."""


def rules_of(graph: ModuleGraph, microbatches: int, make: MakeOrder = unordered) -> ListRules:
    """Return the rules of a list schedule: orders of modules for which ``make`` returns one, bounds of other modules.

    The bound of a stage is the number of stages on the longest path from it to a sink, itself included, if every
    pass has one microbatch: so many keep the path busy, and more would only cost memory. Pipeline ranks without a
    backward are bounded too, since their order would do all forwards at once.
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
            runs_backward = any(StageId(name, stage) in wiring.backward for stage in module.stages_at(place))
            if order_of is not None and runs_backward:
                steps = list(order_of(place))
                orders[PipelineRank(name, place)] = [
                    Pass(step.kind, StageId(name, step.stage), passes[step.number])
                    for step in _trimmed(module, steps, wiring)
                ]
                ahead |= {StageId(name, stage): each * _ahead(steps, stage) for stage in module.stages_at(place)}
        for stage in reversed(range(module.stages)):
            lead = ahead.setdefault(StageId(name, stage), each * (1 + -(-lead // each)))
    return ListRules(priority=soonest_free(graph), orders=orders, bounds=ahead, seconds=_seconds(graph))


def _seconds(graph: ModuleGraph) -> Callable[[Pass], float]:
    """Return the time of passes in units; a projector beside its tower takes a small part of one."""
    small = {module.name for module in graph.modules if module.projector_of}
    if not small:
        return units
    return lambda wanted: units(wanted) * (_PROJECTOR if wanted.stage.module in small else 1)


def _lead(graph: ModuleGraph, module: Module, ahead: Mapping[StageId, int]) -> int:
    """Return by how many microbatches the last stage of a module must be ahead of the modules that it feeds; 0 if none.

    If those have smaller passes, the gradients of a pass's first microbatch wait for those of its last.
    """
    fed = [graph.by_name[target] for source, target in graph.arrows if source == module.name]
    targets = [target for target in fed if target.prefetch == module.prefetch]
    return max(
        (
            ahead[graph.fed_stage(module.name, target.name)] + max(0, module.batch_factor - target.batch_factor)
            for target in targets
        ),
        default=0,
    )


def _ahead(steps: Sequence[PassIndex], stage: int) -> int:
    """Return by how many passes, at most, a stage is ahead when its next (input) gradient begins."""
    forwards = backwards = max_ahead = 0
    for step in steps:
        if step.stage == stage:
            if step.kind == "forward":
                forwards += 1
            elif step.kind != "weight-gradient":
                max_ahead = max(max_ahead, forwards - backwards)
                backwards += 1
    return max_ahead


def _trimmed(module: Module, steps: Sequence[PassIndex], wiring: Wiring) -> Iterator[PassIndex]:
    """Yield an order without what its stages need not do, and with whole backwards where splitting has no use.

    It has no use where nothing trains, so that there is no weight gradient, and where nobody waits for the input
    gradients and the weight gradient follows each at once.
    """
    unsplit = {
        stage
        for stage in {step.stage for step in steps}  # of one pipeline rank: looking at all would be quadratic
        if not module.trains[stage] or _is_unsplit(StageId(module.name, stage), steps, wiring)
    }
    for step in steps:
        if step.kind == "forward":
            yield step
        elif StageId(module.name, step.stage) in wiring.backward:
            if step.stage not in unsplit:
                yield step
            elif step.kind != "weight-gradient":
                yield step._replace(kind="backward")


def _is_unsplit(stage: StageId, steps: Sequence[PassIndex], wiring: Wiring) -> bool:
    if any(edge.gradient for edge in wiring.inputs[stage]):
        return False
    behind = zip(steps, (*steps[1:], None), strict=True)
    return all(
        then == step._replace(kind="weight-gradient")
        for step, then in behind
        if step.stage == stage.stage and step.kind == "input-gradient"
    )


def soonest_free(graph: ModuleGraph) -> Callable[[Pass], tuple[int, ...]]:
    """Return a priority of passes by which those that free memory soonest go first.

    Gradients go before forwards, and these before weight gradients. Of forwards, the one due soonest goes first, since
    a stage should be ahead of the sink by its distance from it; then the lowest microbatch, then the stage nearer to
    the sink. Passes for the next step go last.
    """
    distance = stages_to_sink(graph)
    facts = {
        stage: (graph.by_name[stage.module].prefetch, distance[stage], number)
        for number, stage in enumerate(graph.stages)
    }

    def key(wanted: Pass) -> tuple[int, ...]:
        first, (prefetch, far, number) = wanted.microbatches[0], facts[wanted.stage]
        if prefetch:
            return (3, first, 0, far, number)
        if wanted.kind == "forward":
            return (1, first - far, first, far, number)
        return (2 if wanted.kind == "weight-gradient" else 0, first, 0, far, number)

    return key
