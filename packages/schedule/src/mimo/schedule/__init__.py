"""The plan of a step: generated, proved, emulated; free of torch. What runs it: `mimo.schedule.runtime`."""

from mimo.hooks import Kind
from mimo.schedule import hookspecs
from mimo.schedule._assemble import Timed, assemble, stages_to_sink
from mimo.schedule._check import check
from mimo.schedule._costs import Costs, Link, Seconds, StageCost
from mimo.schedule._emulate import EmulationResult, emulate
from mimo.schedule._in_flight import in_flight
from mimo.schedule._memory import ActorPeak, Peak, peak_activations
from mimo.schedule._network import Peers
from mimo.schedule._page import write_page
from mimo.schedule._plan import Action, ActionKind, ActorPlan, Half, Plan, ScheduleSpec, tied_edge
from mimo.schedule._routes import Cut, End, Piece, Route, boundary_route, pipeline_route
from mimo.schedule._simulate import simulate
from mimo.schedule._simulation import Simulation
from mimo.schedule._spans import Span
from mimo.schedule._timeline import Bar, Timeline, Transfer
from mimo.schedule._trace import write_trace
from mimo.schedule._traffic import Traffic

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
    "EmulationResult",
    "End",
    "Half",
    "Link",
    "Peak",
    "Peers",
    "Piece",
    "Plan",
    "Route",
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
    "emulate",
    "in_flight",
    "peak_activations",
    "pipeline_route",
    "simulate",
    "stages_to_sink",
    "tied_edge",
    "write_page",
    "write_trace",
]
