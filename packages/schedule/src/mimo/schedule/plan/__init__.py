"""The plan of a step as a value: actions, costs, wiring of the graph, timeline, and how computations become a plan."""

from mimo.schedule.plan.assembly import COMPUTATIONS, Timed, assemble, stages_to_sink
from mimo.schedule.plan.costs import Costs, Link, Seconds, StageCost
from mimo.schedule.plan.plan import (
    Action,
    ActionKind,
    ActorPlan,
    Plan,
    PlanPhase,
    plans_from_json,
    plans_to_json,
    tied_edge,
)
from mimo.schedule.plan.spec import ScheduleSpec
from mimo.schedule.plan.texts import action_text, microbatches_text, place_text, ranks_text, stage_text
from mimo.schedule.plan.timeline import Bar, Timeline, Transfer
from mimo.schedule.plan.wiring import Wiring

__all__ = [
    "COMPUTATIONS",
    "Action",
    "ActionKind",
    "ActorPlan",
    "Bar",
    "Costs",
    "Link",
    "Plan",
    "PlanPhase",
    "ScheduleSpec",
    "Seconds",
    "StageCost",
    "Timed",
    "Timeline",
    "Transfer",
    "Wiring",
    "action_text",
    "assemble",
    "microbatches_text",
    "place_text",
    "plans_from_json",
    "plans_to_json",
    "ranks_text",
    "stage_text",
    "stages_to_sink",
    "tied_edge",
]
