"""Proves that the list of one actor does all its tasks of a step, each once, in a possible order.

Everything that an action needs is done before it by the same stage on the same actor, if only by receiving it. So each
list is proved complete and possible by itself; `check_matching` and `check_waiting` prove that lists fit together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from operator import lt
from typing import get_args

import attrs

from mimo.hooks import PlanError
from mimo.schedule.plan import (
    Action,
    ActionKind,
    ActorPlan,
    Wiring,
    action_text,
    microbatches_text,
    place_text,
    ranks_text,
    stage_text,
    tied_edge,
)
from mimo.topology import StageId

TaskKey = tuple[ActionKind, str, int, str | None]
"""A task by kind, module, stage and edge: done once for each microbatch, or, as a reduction, once.

`_ActorTasks.first` gives the first of these microbatches, of this step or of the next one.
"""
_NOWHERE = -1
_Passes = frozenset[tuple[int, ...]]


def check_actor(actor: ActorPlan, stages: Sequence[StageId], microbatches: int, wiring: Wiring) -> None:
    """Refuse a list that omits a task, does one twice or too early, or does one that is not the actor's.

    Raises:
        PlanError: it names the actor, the action and the cause.
    """
    checked = _ActorTasks(actor=actor, stages=stages, microbatches=microbatches, wiring=wiring)
    checked.find_places()
    for stage in stages:
        checked.check_complete(stage)
    late = [each for stage in stages for before, after in checked.orders(stage) for each in _late(before, after)]
    if late:
        index, needed, place = min(late)
        action = actor.actions[needed]
        microbatch = place + checked.first((action.kind, action.module, action.stage, action.edge))
        part = attrs.evolve(action, microbatches=(microbatch,) if action.microbatches else ())
        raise PlanError(
            place_text(actor.ranks, index, actor.actions[index]),
            expected=f"it after {action_text(part)}",
            got=f"that at action {needed}",
        )


def _late(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the later index, the earlier one and the microbatch, wherever an order is violated."""
    if not all(map(lt, before, after)):
        for microbatch, (needed, index) in enumerate(zip(before, after, strict=True)):
            if needed > index:
                yield index, needed, microbatch


@attrs.define(kw_only=True, eq=False)
class _ActorTasks:
    """One actor's list, and the index in it of each task, by microbatch; a reduction has one index."""

    actor: ActorPlan
    stages: Sequence[StageId]
    microbatches: int
    wiring: Wiring
    places: dict[TaskKey, list[int]] = attrs.field(factory=dict)

    def find_places(self) -> None:
        """Find the index of each task; refuse one that is not this actor's, or is done twice."""
        firsts: dict[TaskKey, int] = {}
        passes: dict[TaskKey, _Passes | None] = {}
        for index, action in enumerate(self.actor.actions):
            task = (action.kind, action.module, action.stage, action.edge)
            places = self.places.get(task)
            first = firsts.get(task, 0)
            if places is None:
                if misfit := _misfit(action, self.stages, self.wiring):
                    raise self._refusal(index, *misfit)
                places = self.places[task] = [_NOWHERE] * (1 if action.kind == "reduce" else self.microbatches)
                first = firsts[task] = self.first(task)
                passes[task] = self._passes(action)
            served, allowed = action.microbatches, passes[task]
            if allowed is None:
                is_usual = len(served) == 1 and 0 <= served[0] - first < len(places) and action.kind != "reduce"
            else:
                is_usual = served in allowed
            if not is_usual and (misfit := _misfit_microbatches(action, first, self.microbatches, allowed)):
                raise self._refusal(index, *misfit)
            for place in served or (0,):
                if places[place - first] != _NOWHERE:
                    raise self._refusal(index, "it once in the list", f"two: {places[place - first]} too")
                places[place - first] = index

    def _passes(self, action: Action) -> _Passes | None:
        """Return the passes of a computation, which are those of its module; messages may take any microbatches.

        A pass is looked up by its microbatches: its samples, and what it saves for both parts of its backward. So
            forward
        and backward must serve exactly the microbatches of a pass.
        """
        if action.kind in ("send", "receive", "reduce"):
            return None
        return frozenset(self.wiring.passes(action.module, self.microbatches))

    def first(self, task: TaskKey) -> int:
        """Return the first microbatch of a task; those of the next step follow this step's.

        A message has the microbatches that its receiver computes.
        """
        kind, module, stage, edge = task
        if kind == "reduce":
            return 0
        receiver = StageId(module, stage) if edge is None else self.wiring.targets[edge]
        return self.wiring.first(receiver, self.microbatches)

    def check_complete(self, stage: StageId) -> None:
        """Refuse a list that lacks a task of ``stage``, or has a backward both whole and in parts."""
        missing: list[tuple[int, int, TaskKey]] = []
        for order, task in enumerate(_needed(stage, self.wiring)):
            places = self.places.get(task, [_NOWHERE])
            if _NOWHERE in places:
                missing.append((places.index(_NOWHERE), order, task))
        if stage in self.wiring.backward:
            missing += [(microbatch, len(self.places), task) for microbatch, task in self._missing_backwards(stage)]
        if missing:
            microbatch, _, task = min(missing)
            raise self._missing(task, microbatch)

    def _missing_backwards(self, stage: StageId) -> Iterator[tuple[int, TaskKey]]:
        """Yield missing backwards and missing parts of backwards; refuse one that is both whole and in parts."""
        whole, first, second = self._backward(stage)
        for microbatch, (index, *parts) in enumerate(zip(whole, first, second, strict=True)):
            if index == _NOWHERE and _NOWHERE in parts:
                absent: ActionKind = "input-gradient" if parts[0] == _NOWHERE else "weight-gradient"
                yield microbatch, ("backward" if parts[0] == parts[1] else absent, *stage, None)
            elif index != _NOWHERE and parts != [_NOWHERE, _NOWHERE]:
                raise self._refusal(index, "a backward either whole or in two parts", "its parts in the list too")

    def orders(self, stage: StageId) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """Yield pairs of indices by microbatch, of which the first must come before the second."""
        forward = self._of("forward", stage)
        for edge in self.wiring.inputs[stage]:
            yield self._of("receive", stage, edge.name), forward
        for edge in self.wiring.outputs[stage]:
            if not self.wiring.is_handed_on(edge):
                yield forward, self._of("send", stage, edge.name)
        if stage in self.wiring.backward:
            yield from self._backward_orders(stage, forward)

    def _backward_orders(self, stage: StageId, forward: Sequence[int]) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        whole, first, second = self._backward(stage)
        gradients, weights = whole, whole
        if _NOWHERE in whole:
            yield first, second
            gradients, weights = list(map(max, whole, first)), list(map(max, whole, second))
        yield forward, gradients
        for edge in self.wiring.outputs[stage]:
            if edge.gradient:
                yield self._of("receive", stage, edge.name), gradients
        for edge in self.wiring.inputs[stage]:
            if edge.gradient:
                yield gradients, self._of("send", stage, edge.name)
        reductions = [self.places[task] for task in _reductions(stage, self.wiring)]
        if reductions:
            yield weights, reductions[0] * self.microbatches
        if reductions[1:]:
            yield reductions[0], reductions[1]

    def _backward(self, stage: StageId) -> tuple[list[int], list[int], list[int]]:
        """Return the indices of whole backwards, and of the two parts of split ones."""
        return self._of("backward", stage), self._of("input-gradient", stage), self._of("weight-gradient", stage)

    def _of(self, kind: ActionKind, stage: StageId, edge: str | None = None) -> list[int]:
        return self.places.get((kind, *stage, edge)) or [_NOWHERE] * self.microbatches

    def _refusal(self, index: int, expected: str, got: str) -> PlanError:
        return PlanError(place_text(self.actor.ranks, index, self.actor.actions[index]), expected=expected, got=got)

    def _missing(self, task: TaskKey, microbatch: int) -> PlanError:
        kind, module, stage, edge = task
        microbatches = () if kind == "reduce" else (self.first(task) + microbatch,)
        text = action_text(Action(kind=kind, module=module, stage=stage, edge=edge, microbatches=microbatches))
        return PlanError(f"plan, {ranks_text(self.actor.ranks)}", expected=f"{text}, once in the list", got="none")


def _misfit(action: Action, stages: Sequence[StageId], wiring: Wiring) -> tuple[str, str] | None:
    """Return what was expected and what got if an actor with ``stages`` has no such action to do."""
    stage = action.stage_id
    if action.kind not in get_args(ActionKind):
        return f"a kind of {', '.join(get_args(ActionKind))}", repr(action.kind)
    if stage not in stages:
        return "a stage that these ranks hold", f"{stage_text(stage)}; they hold {', '.join(map(stage_text, stages))}"
    if reason := _why_not(action, wiring):
        return f"something that {stage_text(stage)} has to do", reason
    return None


def _misfit_microbatches(
    action: Action, first: int, microbatches: int, passes: _Passes | None
) -> tuple[str, str] | None:
    """Return the same where it serves none of the microbatches that it has to, or others, or those of no pass."""
    served = action.microbatches
    if action.kind == "reduce":
        return ("a reduction without microbatches", microbatches_text(served)) if served else None
    last = first + microbatches - 1
    if not served:
        return f"microbatches from {first} to {last}", "none"
    if min(served) < first or max(served) > last or (len(served) > 1 and max(Counter(served).values()) > 1):
        return f"each microbatch once, from {first} to {last}", microbatches_text(served)
    if passes is not None and served not in passes:
        whole = next(each for each in passes if served[0] in each)
        return f"a whole pass of {action.module}, {microbatches_text(whole)}", microbatches_text(served)
    return None


def _why_not(action: Action, wiring: Wiring) -> str | None:  # noqa: PLR0911 - one return for each fault
    stage = action.stage_id
    if action.kind == "reduce":
        if (action.kind, *stage, action.edge) in _reductions(stage, wiring):
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


def _needed(stage: StageId, wiring: Wiring) -> Iterator[TaskKey]:
    """Yield the tasks of ``stage`` except its backward, which may be in two parts."""
    yield ("forward", *stage, None)
    for edge in wiring.inputs[stage]:
        yield ("receive", *stage, edge.name)
        if edge.gradient:
            yield ("send", *stage, edge.name)
    for edge in wiring.outputs[stage]:
        yield ("send", *stage, edge.name)
        if edge.gradient:
            yield ("receive", *stage, edge.name)
    yield from _reductions(stage, wiring)


def _reductions(stage: StageId, wiring: Wiring) -> tuple[TaskKey, ...]:
    """Return the reductions of ``stage``, in their required order."""
    own: tuple[TaskKey, ...] = (("reduce", *stage, None),) if wiring.trains(stage) else ()
    if stage in wiring.tied_stages(stage.module):
        return (("reduce", *stage, tied_edge(stage.module)), *own)
    return own
