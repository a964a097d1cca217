"""The ``gpipe`` schedule over any module graph: all forwards, then all backwards.

Huang et al., "GPipe" (2019), section 2.3. It saves the activations of the whole step. A rank with several chunks does
all microbatches of one before the next, so that its pipeline fills and drains in the time of one chunk a rank.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from mimo.hooks import hookimpl
from mimo.schedule.plan import Costs, Plan, ScheduleSpec
from mimo.schedule.schedules.named import OrderOf, Pipeline, planned
from mimo.schedule.schedules.orders import PassIndex, in_groups, one_after_one
from mimo.topology import ModuleGraph


@attrs.frozen(kw_only=True)
class GPipe:
    """Configuration of the ``gpipe`` schedule; it has no keys."""


def generate(graph: ModuleGraph, microbatches: int, config: GPipe, _costs: Costs) -> Plan:
    """Return the GPipe plan of ``microbatches`` microbatches over ``graph``; without training, of forwards alone.

    Raises:
        ConfigError: there is no microbatch.
    """
    assert isinstance(config, GPipe), config
    return planned("gpipe", graph, microbatches, _order)


def _order(pipeline: Pipeline) -> OrderOf:
    passes = pipeline.passes

    def order_of(place: int) -> Iterable[PassIndex]:
        stages = pipeline.module.stages_at(place)
        forwards, backwards = (in_groups(order, passes, passes) for order in (stages, stages[::-1]))
        return one_after_one(forwards, backwards, warm=len(forwards))

    return order_of


@hookimpl
def mimo_register_schedules() -> list[ScheduleSpec]:
    """Register ``gpipe``."""
    return [ScheduleSpec(name="gpipe", config=GPipe, generate=generate, uses_costs=False)]
