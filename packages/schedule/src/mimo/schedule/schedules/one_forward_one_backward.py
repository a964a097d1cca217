"""The ``1f1b`` schedule over any module graph: a list schedule with bounded microbatches in flight.

For a plain pipeline this is the textbook one-forward-one-backward order (PipeDream-Flush: Narayanan et al., "Memory-
Efficient Pipeline-Parallel DNN Training", 2021, section 3). For a graph, each stage is ahead of a sink by its distance
from it, and of the computations that an actor could begin, the one that frees memory soonest goes first.
"""

from __future__ import annotations

import attrs

from mimo.hooks import hookimpl
from mimo.schedule.plan import Costs, Plan, ScheduleSpec
from mimo.schedule.schedules.named import planned, unordered
from mimo.topology import ModuleGraph


@attrs.frozen(kw_only=True)
class OneForwardOneBackward:
    """Configuration of the ``1f1b`` schedule; it has no keys."""


def generate(graph: ModuleGraph, microbatches: int, config: OneForwardOneBackward, _costs: Costs) -> Plan:
    """Return the 1F1B plan of ``microbatches`` microbatches over ``graph``; without training, of forwards alone.

    Raises:
        ConfigError: there is no microbatch.
    """
    assert isinstance(config, OneForwardOneBackward), config
    return planned("1f1b", graph, microbatches, unordered)


@hookimpl
def mimo_register_schedules() -> list[ScheduleSpec]:
    """Register ``1f1b``."""
    return [ScheduleSpec(name="1f1b", config=OneForwardOneBackward, generate=generate, uses_costs=False)]
