"""The plan of one step: what each actor does, in order. A plain, serialisable value, made before anything runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Literal, cast, get_args

import attrs

from mimo.hooks import JsonNode, JsonSource, PlanError
from mimo.topology import StageId

ActionKind = Literal["forward", "backward", "input-gradient", "weight-gradient", "send", "receive", "reduce"]
PlanPhase = Literal["both", "next", "this"]
"""Which part of a plan runs: all, only what is for the next step (before the first one), or the rest (in the last)."""


@attrs.frozen(kw_only=True)
class Action:
    """One thing that an actor does.

    Args:
        kind: ``send`` and ``receive`` move rows along ``edge`` when (module, stage) is its source for the send and
            its target for the receive, and gradients against it otherwise; ``reduce`` sums the stage's gradients
            over its ranks, or, with an edge, the gradients of a parameter that two stages share.
        module, stage: the part of the model that does it; a rank that holds several stages of a module does each.
        microbatches: those that it serves, the next step's counted on from this one's; empty for ``reduce``.
        edge: the edge of a message.
    """

    kind: ActionKind
    module: str
    stage: int
    microbatches: tuple[int, ...] = ()
    edge: str | None = None

    @property
    def stage_id(self) -> StageId:
        """The stage that acts."""
        return StageId(self.module, self.stage)


@attrs.frozen(kw_only=True)
class ActorPlan:
    """The ordered actions that each of ``ranks`` does."""

    ranks: tuple[int, ...]
    actions: tuple[Action, ...]


@attrs.frozen(kw_only=True)
class Plan:
    """What every rank does in one step of ``microbatches`` microbatches.

    Microbatch ``microbatches + m`` is microbatch ``m`` of the next step: modules with ``prefetch`` work on those, and
    send the rows of this step's that they made in the step before.
    """

    schedule: str
    microbatches: int
    actors: tuple[ActorPlan, ...]

    def actions_of(self, rank: int) -> tuple[Action, ...]:
        """Return the actions of ``rank``; a rank without a module has none."""
        return next((actor.actions for actor in self.actors if rank in actor.ranks), ())

    def phase(self, phase: PlanPhase) -> Plan:
        """Return the plan with only the actions for the next step, or without them."""
        if phase == "both":
            return self

        def selected(actions: tuple[Action, ...]) -> tuple[Action, ...]:
            return tuple(action for action in actions if self.is_ahead(action) == (phase == "next"))

        return attrs.evolve(
            self, actors=tuple(attrs.evolve(actor, actions=selected(actor.actions)) for actor in self.actors)
        )

    def is_ahead(self, action: Action) -> bool:
        """Whether an action is for the next step."""
        return bool(action.microbatches) and action.microbatches[0] >= self.microbatches

    def to_json(self) -> str:
        """Return the plan as JSON text."""
        return json.dumps(attrs.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that `to_json` wrote.

        Raises:
            PlanError: the text is no JSON, or a value is missing, unknown or of another type; it says where.
        """
        return _read_plan(JsonSource(where="plan", error=PlanError).parse(text))


def plans_to_json(plans: Sequence[Plan]) -> str:
    """Return the plans of a job as JSON text: of several an array, of one itself, as `Plan.to_json` does."""
    return plans[0].to_json() if len(plans) == 1 else json.dumps([attrs.asdict(plan) for plan in plans], indent=1)


def plans_from_json(text: str) -> tuple[Plan, ...]:
    """Return the plans that `plans_to_json` wrote; `PlanError` as from `Plan.from_json`."""
    node = JsonSource(where="plan", error=PlanError).parse(text)
    return tuple(map(_read_plan, node.list() if isinstance(node.value, list) else [node]))


def _read_plan(node: JsonNode) -> Plan:
    fields = _fields(node, Plan)
    return Plan(
        schedule=fields["schedule"].text(),
        microbatches=fields["microbatches"].integer(),
        actors=tuple(map(_read_actor, fields["actors"].list())),
    )


def _fields(node: JsonNode, cls: type[attrs.AttrsInstance]) -> Mapping[str, JsonNode]:
    """Return the values of an object that has a class's fields."""
    optional = [field.name for field in attrs.fields(cls) if field.default is not attrs.NOTHING]
    return node.fields([field.name for field in attrs.fields(cls) if field.name not in optional], optional)


def _read_actor(value: JsonNode) -> ActorPlan:
    fields = _fields(value, ActorPlan)
    return ActorPlan(ranks=fields["ranks"].integers(), actions=tuple(map(_read_action, fields["actions"].list())))


def _read_action(value: JsonNode) -> Action:
    fields = _fields(value, Action)
    kind = fields["kind"].text()
    if kind not in get_args(ActionKind):
        raise fields["kind"].fail(f"one of {', '.join(get_args(ActionKind))}")
    edge = fields.get("edge")
    return Action(
        kind=cast("ActionKind", kind),
        module=fields["module"].text(),
        stage=fields["stage"].integer(),
        microbatches=fields["microbatches"].integers() if "microbatches" in fields else (),
        edge=None if edge is None or edge.value is None else edge.text(),
    )


def tied_edge(module: str) -> str:
    """Return the edge name of the ``reduce`` that sums the gradients of a parameter that two stages share."""
    return f"{module}.tied"
