"""The ``zero-bubble`` schedules over any module graph: split backwards, whose second parts fill the gaps.

Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241). Other stages wait only for the gradient of a
stage's inputs; that of its weights can be computed whenever a rank would be idle. Pipelines keep to the orders of the
paper, and all other modules are scheduled around them with whole backwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Literal, get_args

import attrs

from mimo.hooks import ConfigError, hookimpl
from mimo.schedule.plan import Costs, Plan, ScheduleSpec
from mimo.schedule.schedules.demands import demand_microbatches, longest_pipeline, passes_text, trains
from mimo.schedule.schedules.named import MakeOrder, OrderOf, Pipeline, planned
from mimo.schedule.schedules.orders import PassIndex, one_after_one, to_and_fro
from mimo.topology import ModuleGraph, Placement

Form = Literal["h1", "h2", "v"]


@attrs.frozen(kw_only=True)
class ZeroBubble:
    """Configuration of the ``zero-bubble`` schedule.

    Args:
        form: ``h1`` saves as many activations as 1F1B on its first rank (section 2.1); ``h2`` saves about twice as many
            and has a smaller bubble, or none (section 2.2); ``v`` puts two chunks on each rank, in a V, and saves as
            many as ``h1``, without a bubble if all computations take the same time (section 6).
    """

    form: Form = "h1"

    def __attrs_post_init__(self) -> None:
        """Refuse an unknown form."""
        if self.form not in get_args(Form):
            raise ConfigError("schedule.form", expected=f"one of {', '.join(get_args(Form))}", got=repr(self.form))


def generate(graph: ModuleGraph, microbatches: int, config: ZeroBubble, _costs: Costs) -> Plan:
    """Return the zero-bubble plan of ``microbatches`` microbatches over ``graph``; without training, of forwards alone.

    Raises:
        ConfigError: the form needs other chunks, or more microbatches; or there is no microbatch.
    """
    assert isinstance(config, ZeroBubble), config
    if trains(graph):
        _demand_chunks(graph, config.form)
        if config.form == "h2":
            _demand_microbatches(graph, microbatches)
    return planned("zero-bubble", graph, microbatches, _ORDERS[config.form])


def _demand_chunks(graph: ModuleGraph, form: Form) -> None:
    max_chunks = 2 if form == "v" else 1
    for module in graph.modules:
        if module.chunks > max_chunks:
            raise ConfigError(
                f"modules.{module.name}.chunks",
                expected=f"{max_chunks} with schedule.form = {form!r}",
                got=repr(module.chunks),
                fix="Set it to 2, or choose schedule.plugin = 'interleaved'."
                if form == "v"
                else "With 2, choose schedule.form = 'v'; with more, schedule.plugin = 'interleaved'.",
            )
    if form == "v" and all(module.chunks == 1 for module in graph.modules):
        raise ConfigError(
            f"modules.{longest_pipeline(graph).name}.chunks",
            expected="2 with schedule.form = 'v', here or in another module",
            got="1",
            fix="Set it to 2, or choose schedule.form = 'h1', which does with 1.",
        )


def _demand_microbatches(graph: ModuleGraph, microbatches: int) -> None:
    demand_microbatches(
        graph,
        microbatches,
        lambda module, count: module.grid.pp == 1 or len(module.passes(count)) >= 2 * module.grid.pp - 1,
        lambda module: f"2 x modules.{module.name}.pp - 1 = {2 * module.grid.pp - 1} or more{passes_text(module)}",
    )


def placement(config: ZeroBubble) -> Placement:
    """Return how the form places chunks on ranks."""
    return "v" if config.form == "v" else "loop"


def _along_h(pipeline: Pipeline, *, pace: int) -> OrderOf | None:
    """Return ZB-H1 (``pace`` 1) or ZB-H2 (2) of a pipeline.

    Each rank warms up by ``pace`` passes more than the next one, and does as many fewer weight gradients meanwhile. If
    the pipeline feeds other modules, its last rank warms up by ``pace`` passes more than their lead.
    """
    ranks, lead = pipeline.module.grid.pp, pipeline.lead
    if ranks == 1:
        return None
    ahead = lead + pace if lead else 1

    def order_of(place: int) -> Iterable[PassIndex]:
        numbers = [(place, number) for number in range(pipeline.passes)]
        warm = pace * (ranks - 1 - place) + ahead
        return one_after_one(numbers, numbers, warm=warm, lag=pace * place)

    return order_of


def _in_a_v(pipeline: Pipeline) -> OrderOf | None:
    """Return ZB-V of a pipeline that feeds no other module; a V leaves no room for the lead that others need."""
    module = pipeline.module
    if module.chunks == 1 or pipeline.lead:
        return None
    assert module.placement == "v", module.name

    def order_of(place: int) -> Iterable[PassIndex]:
        down, up = module.stages_at(place)
        return to_and_fro((down, up), pipeline.passes, ranks=module.grid.pp, place=place)

    return order_of


_ORDERS: Mapping[Form, MakeOrder] = {"h1": partial(_along_h, pace=1), "h2": partial(_along_h, pace=2), "v": _in_a_v}


@hookimpl
def mimo_register_schedules() -> list[ScheduleSpec]:
    """Register ``zero-bubble``."""
    return [
        ScheduleSpec(name="zero-bubble", config=ZeroBubble, generate=generate, placement=placement, uses_costs=False),
    ]
