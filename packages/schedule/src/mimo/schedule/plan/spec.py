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
        generate: of a graph, the number of microbatches, a config and the costs of the graph returns a plan that
            `check` accepts. A graph in which nothing trains asks for forwards alone, as evaluation runs them. An order
            that is fixed by its name has no use for costs; one that fills gaps weighs them.
        placement: of a config, how the chunks of the modules that have several are to lie on their ranks.
        weighs: whether `generate` looks at the costs. To tell them, samples are looked at and modules of strangers
            made up, which is spared a schedule that doesn't; it is given costs in which all stages are alike.
    """

    name: str
    config: type
    generate: Callable[[ModuleGraph, int, Any, Costs], Plan]
    placement: Callable[[Any], Placement] = lambda _config: "loop"
    weighs: bool = True
