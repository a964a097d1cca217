"""What one actor has to do in a step, as the graph alone says, and whether its list does that in a possible order.

All that an action needs is done by the same stage on the same actor before it, if only the receive of it. So each list
can be proved complete and possible by itself; how lists fit together is the business of `_check` and `_waiting`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

from mimo.hooks import PlanError
from mimo.schedule._plan import Action, ActionKind, ActorPlan, tied_edge
from mimo.schedule._texts import action_text, microbatches_text, place_text, ranks_text, stage_text
from mimo.schedule._wiring import Wiring
from mimo.topology import StageId

Deed = tuple[ActionKind, StageId, str | None, int | None]
"""One part of an action: kind, stage, edge and one microbatch (none for a reduction)."""


def check_deeds(actor: ActorPlan, stages: Sequence[StageId], microbatches: int, wiring: Wiring) -> None:
    """Refuse a list that leaves something out, does it twice or before what it needs, or does what it must not.

    Raises:
        PlanError: it names the actor, the action and the cause.
    """
    for index, action in enumerate(actor.actions):
        if misfit := _misfit(action, stages, microbatches, wiring):
            raise PlanError(place_text(actor.ranks, index, action), expected=misfit[0], got=misfit[1])
    places = _places(actor)
    for stage in stages:
        for microbatch in range(microbatches):
            _check_microbatch(actor, stage, microbatch, places, wiring)
        for deed in _reductions(stage, wiring):
            if deed not in places:
                raise _missing(actor, deed)
    for index, action in enumerate(actor.actions):
        for needed in _needs(action, microbatches, places, wiring):
            if places[needed] > index:
                raise PlanError(
                    place_text(actor.ranks, index, action),
                    expected=f"it after {action_text(_as_action(needed))}",
                    got=f"that at action {places[needed]}",
                )


def _misfit(action: Action, stages: Sequence[StageId], microbatches: int, wiring: Wiring) -> tuple[str, str] | None:  # noqa: PLR0911 - one return for each fault
    """Return what was expected and what got if an actor with ``stages`` has no such action to do."""
    stage = action.stage_id
    if action.kind not in get_args(ActionKind):
        return f"a kind of {', '.join(get_args(ActionKind))}", repr(action.kind)
    if stage not in stages:
        return "a stage that these ranks hold", f"{stage_text(stage)}; they hold {', '.join(map(stage_text, stages))}"
    if action.kind == "reduce" and action.microbatches:
        return "a reduction without microbatches", microbatches_text(action.microbatches)
    if action.kind != "reduce" and not action.microbatches:
        return f"microbatches from 0 to {microbatches - 1}", "none"
    for microbatch, times in Counter(action.microbatches).items():
        if times > 1 or not 0 <= microbatch < microbatches:
            return f"each microbatch once, from 0 to {microbatches - 1}", microbatches_text(action.microbatches)
    if reason := _why_not(action, wiring):
        return f"something that {stage_text(stage)} has to do", reason
    return None


def _why_not(action: Action, wiring: Wiring) -> str | None:  # noqa: PLR0911 - one return for each fault
    stage = action.stage_id
    if action.kind == "reduce":
        if (action.kind, stage, action.edge, None) in _reductions(stage, wiring):
            return None
        return "a reduction where nothing trains" if action.edge is None else f"nothing tied called {action.edge!r}"
    if action.kind not in ("send", "receive"):
        if action.edge is not None:
            return "an edge on a computation"
        no_backward = action.kind != "forward" and stage not in wiring.backward
        return "a backward where no gradient is needed" if no_backward else None
    edge = wiring.edges.get(action.edge or "")
    if edge is None:
        return f"an edge {action.edge!r} that the graph does not have"
    if stage not in (edge.source, edge.target):
        return f"an edge from {stage_text(edge.source)} to {stage_text(edge.target)}"
    carries_rows = (action.kind == "send") == (stage == edge.source)
    return None if carries_rows or edge.gradient else "a gradient on an edge that carries none"


def _places(actor: ActorPlan) -> dict[Deed, int]:
    places: dict[Deed, int] = {}
    for index, action in enumerate(actor.actions):
        stage = action.stage_id
        for microbatch in action.microbatches or (None,):
            deed: Deed = (action.kind, stage, action.edge, microbatch)
            if deed in places:
                raise PlanError(
                    place_text(actor.ranks, index, action),
                    expected="it once in the list",
                    got=f"two: {places[deed]} too",
                )
            places[deed] = index
    return places


def _check_microbatch(
    actor: ActorPlan, stage: StageId, microbatch: int, places: Mapping[Deed, int], wiring: Wiring
) -> None:
    whole: Deed = ("backward", stage, None, microbatch)
    parts: list[Deed] = [("input-gradient", stage, None, microbatch), ("weight-gradient", stage, None, microbatch)]
    split = any(part in places for part in parts)
    needed: list[Deed] = [("forward", stage, None, microbatch)]
    for edge in wiring.inputs[stage]:
        needed.append(("receive", stage, edge.name, microbatch))
        needed += [("send", stage, edge.name, microbatch)] * edge.gradient
    for edge in wiring.outputs[stage]:
        needed.append(("send", stage, edge.name, microbatch))
        needed += [("receive", stage, edge.name, microbatch)] * edge.gradient
    if stage in wiring.backward:
        needed += parts if split else [whole]
    for deed in needed:
        if deed not in places:
            raise _missing(actor, deed)
    if split and whole in places:
        raise PlanError(
            place_text(actor.ranks, places[whole], actor.actions[places[whole]]),
            expected="a backward either whole or in two parts",
            got="its parts in the list too",
        )


def _reductions(stage: StageId, wiring: Wiring) -> tuple[Deed, ...]:
    """Return the reductions of ``stage``, in the order that they must have."""
    own: tuple[Deed, ...] = (("reduce", stage, None, None),) if wiring.trains(stage) else ()
    if stage in wiring.tied_stages(stage.module):
        return (("reduce", stage, tied_edge(stage.module), None), *own)
    return own


def _needs(action: Action, microbatches: int, places: Mapping[Deed, int], wiring: Wiring) -> Iterator[Deed]:
    """Yield what must stand before ``action`` in its list; `_check_microbatch` has found all of it to be there."""
    stage = action.stage_id
    if action.kind == "reduce":
        if action.edge is None:
            yield from _reductions(stage, wiring)[:-1]
        for microbatch in range(microbatches):
            yield _gradient_of("weight-gradient", stage, microbatch, places)
    for microbatch in action.microbatches:
        if action.kind == "weight-gradient":
            yield ("input-gradient", stage, None, microbatch)
        elif action.kind == "send":
            from_source = wiring.edges[action.edge or ""].source == stage
            rows: Deed = ("forward", stage, None, microbatch)
            yield rows if from_source else _gradient_of("input-gradient", stage, microbatch, places)
        elif action.kind != "receive":
            if action.kind != "forward":
                yield ("forward", stage, None, microbatch)
            for edge in wiring.feeds(action):
                yield ("receive", stage, edge.name, microbatch)


def _gradient_of(part: ActionKind, stage: StageId, microbatch: int, places: Mapping[Deed, int]) -> Deed:
    """Return the computation that has this part of a backward, which is the whole where it is not split."""
    split: Deed = (part, stage, None, microbatch)
    return split if split in places else ("backward", stage, None, microbatch)


def _as_action(deed: Deed) -> Action:
    kind, stage, edge, microbatch = deed
    microbatches = () if microbatch is None else (microbatch,)
    return Action(kind=kind, module=stage.module, stage=stage.stage, edge=edge, microbatches=microbatches)


def _missing(actor: ActorPlan, deed: Deed) -> PlanError:
    text = action_text(_as_action(deed))
    return PlanError(f"plan, {ranks_text(actor.ranks)}", expected=f"{text}, once in the list", got="none")
