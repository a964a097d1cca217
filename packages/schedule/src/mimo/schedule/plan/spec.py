"""What a schedule plugin registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from mimo.schedule.plan.costs import Costs
from mimo.schedule.plan.plan import Plan
from mimo.topology import ModuleGraph, Placement


@attrs.frozen(kw_only=True)
class ScheduleSpec:
    """A schedule plugin.

    Args:
        name: what users write as ``schedule.plugin``.
        config: attrs class of its settings.
        generate: returns a plan that `check` accepts, for a graph, a number of microbatches, a config and costs. A
            graph in which nothing trains asks for forwards alone, as evaluation runs them. A schedule with a fixed
            order ignores the costs; one that fills gaps uses them.
        placement: for a config, how the chunks of modules with several chunks lie on their ranks.
        uses_costs: whether `generate` uses the costs. Estimating them reads samples and builds third-party modules;
            a schedule that doesn't use them is given costs in which all stages are equal.
    """

    name: str
    config: type
    generate: Callable[[ModuleGraph, int, Any, Costs], Plan]
    placement: Callable[[Any], Placement] = lambda _config: "loop"
    uses_costs: bool = True
