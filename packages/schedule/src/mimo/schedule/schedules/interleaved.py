"""The ``interleaved`` schedule over any module graph: 1F1B on the chunks of each rank in turn, in Megatron's order.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021, section 2.2.
With V chunks a pipeline fills and drains in a V-th of the time, and saves more activations. Modules with one chunk are
scheduled around those with several.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from mimo.hooks import ConfigError, hookimpl
from mimo.schedule.plan import Costs, Plan, ScheduleSpec
from mimo.schedule.schedules.demands import demand_microbatches, longest_pipeline, passes_text, trains
from mimo.schedule.schedules.named import OrderOf, Pipeline, planned
from mimo.schedule.schedules.orders import PassIndex, in_groups, one_after_one
from mimo.topology import ModuleGraph


@attrs.frozen(kw_only=True)
class Interleaved:
    """Configuration of the ``interleaved`` schedule; it has no keys."""


def generate(graph: ModuleGraph, microbatches: int, config: Interleaved, _costs: Costs) -> Plan:
    """Return the interleaved plan of ``microbatches`` microbatches over ``graph``; without training, of forwards alone.

    Raises:
        ConfigError: no module has several chunks; or there is no microbatch, or the number is no multiple of the
            pipeline ranks of each module with chunks.
    """
    assert isinstance(config, Interleaved), config
    if trains(graph):
        _demand(graph, microbatches)
    return planned("interleaved", graph, microbatches, _order)


def _demand(graph: ModuleGraph, microbatches: int) -> None:
    if all(module.chunks == 1 for module in graph.modules):
        raise ConfigError(
            f"modules.{longest_pipeline(graph).name}.chunks",
            expected="2 or more with schedule.plugin = 'interleaved', here or in another module",
            got="1",
            fix="The smallest that works is 2; or choose schedule.plugin = '1f1b'.",
        )
    demand_microbatches(
        graph,
        microbatches,
        lambda module, count: module.chunks == 1 or len(module.passes(count)) % module.grid.pp == 0,
        lambda module: f"a multiple of modules.{module.name}.pp = {module.grid.pp}{passes_text(module)}",
    )


def _order(pipeline: Pipeline) -> OrderOf | None:
    if pipeline.module.chunks == 1:
        return None
    ranks = pipeline.module.grid.pp
    fill = (pipeline.module.chunks - 1) * ranks + (_more(pipeline) if pipeline.lead else 0)

    def order_of(place: int) -> Iterable[PassIndex]:
        forwards, backwards = _turns(pipeline, place)
        return one_after_one(forwards, backwards, warm=fill + 2 * (ranks - place) - 1)

    return order_of


def _turns(pipeline: Pipeline, place: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the forwards and the backwards of a rank, in order."""
    stages, group = pipeline.module.stages_at(place), pipeline.module.grid.pp
    return in_groups(stages, pipeline.passes, group), in_groups(stages[::-1], pipeline.passes, group)


def _more(pipeline: Pipeline) -> int:
    """Return how many more passes ranks must warm up so that the last stage has its lead.

    It adds two, the distance between a stage and the next.
    """
    module = pipeline.module
    last = module.stages - 1
    forwards, backwards = (
        [number for number, (stage, _) in enumerate(turns) if stage == last]
        for turns in _turns(pipeline, module.grid.pp - 1)
    )
    late = max(
        forwards[min(number + pipeline.lead, pipeline.passes - 1)] - backwards[number]
        for number in range(pipeline.passes)
    )
    return 2 + late - (module.chunks - 1) * module.grid.pp


@hookimpl
def mimo_register_schedules() -> list[ScheduleSpec]:
    """Register ``interleaved``."""
    return [ScheduleSpec(name="interleaved", config=Interleaved, generate=generate, uses_costs=False)]
