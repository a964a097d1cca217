"""The plan as a value: what a rank looks up in it, and its JSON form."""

from __future__ import annotations

import cattrs
import pytest

from mimo.schedule import Action, ActorPlan, Plan, tied_edge
from mimo.topology import StageId


def _plan() -> Plan:
    send = Action(kind="send", module="v", stage=1, microbatches=(0, 1), edge="v->l")
    reduce = Action(kind="reduce", module="l", stage=0, edge=tied_edge("l"))
    return Plan(
        schedule="by hand",
        microbatches=2,
        actors=(ActorPlan(ranks=(0, 2), actions=(send,)), ActorPlan(ranks=(1,), actions=(reduce,))),
    )


def test_a_plan_survives_json_with_every_field() -> None:
    """Edges, several microbatches and none come back as they were."""
    assert Plan.from_json(_plan().to_json()) == _plan()


def test_an_unknown_kind_is_refused_when_read() -> None:
    """A plan from a file holds kinds that exist."""
    with pytest.raises(cattrs.BaseValidationError):
        Plan.from_json(_plan().to_json().replace('"reduce"', '"reduse"'))


def test_a_rank_finds_its_list() -> None:
    """Ranks of one actor share a list, and a rank in a gap has nothing to do."""
    plan = _plan()
    assert plan.actions_of(2) == plan.actions_of(0) == plan.actors[0].actions
    assert plan.actions_of(0)[0].stage_id == StageId("v", 1)
    assert plan.actions_of(7) == ()
