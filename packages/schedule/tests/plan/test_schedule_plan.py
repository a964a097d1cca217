"""The plan as a value: what a rank looks up in it, and its JSON form."""

from __future__ import annotations

import json

import pytest

from mimo.hooks import PlanError
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


def test_what_has_a_default_may_be_left_out() -> None:
    """A plan that was written by hand need not say what an action has not."""
    text = '{"schedule": "s", "microbatches": 1, "actors": [{"ranks": [0], "actions": [%s]}]}'
    action = '{"kind": "reduce", "module": "l", "stage": 0}'
    assert Plan.from_json(text % action).actions_of(0) == (Action(kind="reduce", module="l", stage=0),)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ('"microbatches": 2', '"microbatches": "2"', r'^plan\.microbatches: expected an integer, got "2"\.$'),
        ('"microbatches": 2', '"microbatches": true', r"^plan\.microbatches: expected an integer, got true\.$"),
        ('"microbatches": 2', '"microbatches": 2.0', r"^plan\.microbatches: expected an integer, got 2\.0\.$"),
        ('"microbatches": 2,', "", r"^plan\.microbatches: expected a value, got none\.$"),
        ('"schedule"', '"Schedule"', r"^plan\.schedule: expected a value, got none\.$"),
        (
            '"microbatches": 2',
            '"microbatches": 2, "steps": 1',
            r"^plan: expected only the keys schedule, microbatches, actors, got 'steps'\.$",
        ),
        (
            '"reduce"',
            '"reduse"',
            r'^plan\.actors\[1\]\.actions\[0\]\.kind: expected one of forward, .*, reduce, got "reduse"\.$',
        ),
        ('"kind": "send"', '"kind": ["send"]', r'\.actions\[0\]\.kind: expected a string, got \["send"\]\.$'),
        ('"module": "v"', '"module": null', r"^plan\.actors\[0\]\.actions\[0\]\.module: expected a string, got null"),
        ('"stage": 1', '"stage": "1"', r'\.actions\[0\]\.stage: expected an integer, got "1"\.$'),
        ('"edge": "v->l"', '"edge": 3', r"\.actions\[0\]\.edge: expected a string, got 3\.$"),
        ('"ranks": [0, 2]', '"ranks": "02"', r'^plan\.actors\[0\]\.ranks: expected an array, got "02"\.$'),
        ('"ranks": [0, 2]', '"ranks": [0, "2"]', r'^plan\.actors\[0\]\.ranks\[1\]: expected an integer, got "2"\.$'),
        ('"microbatches": [0, 1]', '"microbatches": null', r"\.microbatches: expected an array, got null\.$"),
    ],
)
def test_a_value_of_another_type_is_refused_when_read(old: str, new: str, text: str) -> None:
    """The error says which value, what it should be, and what it is; nothing is made to fit."""
    written = json.dumps(json.loads(_plan().to_json()))  # on one line
    assert old in written
    with pytest.raises(PlanError, match=text):
        Plan.from_json(written.replace(old, new))


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ('{"schedule": "by hand",', r"^plan: expected JSON, got Expecting property name .* at line 1, column \d+\.$"),
        ("", r"^plan: expected JSON, got Expecting value at line 1, column 1\.$"),
        ("[" * 200_000, r"^plan: expected JSON, got too many levels of nesting\.$"),
        ("[]", r"^plan: expected an object, got \[\]\.$"),
        (f'"{"x" * 100}"', r'^plan: expected an object, got "x{78}…\.$'),
    ],
)
def test_a_text_that_is_no_plan_is_refused(written: str, text: str) -> None:
    """Broken JSON is refused with its place, and another value than an object with its beginning."""
    with pytest.raises(PlanError, match=text):
        Plan.from_json(written)


def test_a_rank_finds_its_list() -> None:
    """Ranks of one actor share a list, and a rank in a gap has nothing to do."""
    plan = _plan()
    assert plan.actions_of(2) == plan.actions_of(0) == plan.actors[0].actions
    assert plan.actions_of(0)[0].stage_id == StageId("v", 1)
    assert plan.actions_of(7) == ()
