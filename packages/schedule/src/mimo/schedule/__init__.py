"""The plan of a step: generated, proved, emulated; free of torch. What runs it: `mimo.schedule.runtime`."""

from mimo.hooks import Kind
from mimo.schedule import hookspecs
from mimo.schedule._assemble import Timed, assemble, stages_to_sink
from mimo.schedule._check import check
from mimo.schedule._costs import Costs, Link, Seconds, StageCost
from mimo.schedule._emulate import EmulationResult, emulate
from mimo.schedule._in_flight import in_flight
from mimo.schedule._network import Peers
from mimo.schedule._plan import Action, ActionKind, ActorPlan, Plan, ScheduleSpec, tied_edge
from mimo.schedule._routes import Cut, End, Piece, Route, boundary_route, pipeline_route
from mimo.schedule._spans import Span
from mimo.schedule._timeline import Bar, Timeline, Transfer
from mimo.schedule._traffic import Traffic

SCHEDULES = Kind(
    group="mimo.schedules", noun="schedule", hook="mimo_register_schedules", hookspecs=hookspecs, spec=ScheduleSpec
)

__all__ = [
    "SCHEDULES",
    "Action",
    "ActionKind",
    "ActorPlan",
    "Bar",
    "Costs",
    "Cut",
    "EmulationResult",
    "End",
    "Link",
    "Peers",
    "Piece",
    "Plan",
    "Route",
    "ScheduleSpec",
    "Seconds",
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
    "pipeline_route",
    "stages_to_sink",
    "tied_edge",
]
