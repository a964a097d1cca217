"""The plan of a step: generated, proved, simulated and drawn, without torch.

`mimo.schedule.runtime` runs plans with torch; `mimo.schedule.testing` emulates them for tests of schedules.
"""

from mimo.hooks import Kind
from mimo.schedule import hookspecs
from mimo.schedule.checker import ActorPeak, Peak, check, in_flight, peak_activations
from mimo.schedule.plan import (
    Action,
    ActionKind,
    ActorPlan,
    Bar,
    Costs,
    Link,
    Plan,
    PlanPhase,
    ScheduleSpec,
    Seconds,
    StageCost,
    Timed,
    Timeline,
    Transfer,
    assemble,
    plans_from_json,
    plans_to_json,
    stages_to_sink,
    tied_edge,
)
from mimo.schedule.routes import Cut, End, Route, RoutePiece, Span, Traffic, boundary_route, pipeline_route
from mimo.schedule.simulator import Simulation, simulate
from mimo.schedule.viewer import write_page, write_trace

SCHEDULES = Kind(
    group="mimo.schedules", noun="schedule", hook="mimo_register_schedules", hookspecs=hookspecs, spec=ScheduleSpec
)

__all__ = [
    "SCHEDULES",
    "Action",
    "ActionKind",
    "ActorPeak",
    "ActorPlan",
    "Bar",
    "Costs",
    "Cut",
    "End",
    "Link",
    "Peak",
    "Plan",
    "PlanPhase",
    "Route",
    "RoutePiece",
    "ScheduleSpec",
    "Seconds",
    "Simulation",
    "Span",
    "StageCost",
    "Timed",
    "Timeline",
    "Traffic",
    "Transfer",
    "assemble",
    "boundary_route",
    "check",
    "in_flight",
    "peak_activations",
    "pipeline_route",
    "plans_from_json",
    "plans_to_json",
    "simulate",
    "stages_to_sink",
    "tied_edge",
    "write_page",
    "write_trace",
]
