"""Proof that no actors wait for each other in a circle, by running the lists with as much waiting as possible.

The plan fixes which action waits for which, so one run decides for all: let actors advance in any order until none can;
if lists are left, their actors wait in a circle. Waits are modelled between actors. The waits of single
ranks, for any routes and groups, are a subset of these, so they form no circle either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence

import attrs

from mimo.hooks import PlanError
from mimo.schedule.plan import ActorPlan, Wiring, action_text, place_text, ranks_text

_NOTHING = -1


@attrs.define(kw_only=True, eq=False)
class _Facts:
    """Facts that actors wait for, numbered: all receivers have posted, all senders have sent, all members are present.

    ``missing`` counts for each fact the actors that have not done their part. A message has two facts, in this order.
    """

    missing: list[int] = attrs.field(factory=list)
    numbers: dict[Hashable, int] = attrs.field(factory=dict)

    def of(self, key: Hashable) -> int:
        """Return the number of a meeting, or of a posted message; the next number is the same message as sent."""
        number = self.numbers.get(key)
        if number is None:
            number = self.numbers[key] = len(self.missing)
            self.missing += (0, 0)
        return number

    def part(self, number: int) -> int:
        """Add an actor that has to do its part of a fact."""
        self.missing[number] += 1
        return number


@attrs.define(kw_only=True, eq=False)
class _ActorWaits:
    """The waits of one actor's list, and its position.

    For each action: the facts that it waits for, the meeting that it joins, and the fact to which it contributes when
    it ends.
    """

    waits: list[tuple[int, ...]] = attrs.field(factory=list)
    meets: list[int] = attrs.field(factory=list)
    completes: list[int] = attrs.field(factory=list)
    position: int = 0
    has_met: bool = False

    def add(self, *, waits: tuple[int, ...] = (), meets: int = _NOTHING, completes: int = _NOTHING) -> None:
        """Append an action."""
        self.waits.append(waits)
        self.meets.append(meets)
        self.completes.append(completes)

    @property
    def is_done(self) -> bool:
        """Whether its list is at its end."""
        return self.position == len(self.waits)


@attrs.define(kw_only=True, eq=False)
class _WaitingRun:
    """The lists while they run, and which actors sleep until which fact."""

    actors: Sequence[_ActorWaits]
    missing: list[int]
    sleepers: dict[int, list[int]] = attrs.field(factory=dict)
    awake: deque[int] = attrs.field(factory=deque)

    def run(self) -> None:
        """Advance every actor as far as possible."""
        self.awake.extend(range(len(self.actors)))
        while self.awake:
            number = self.awake.popleft()
            actor = self.actors[number]
            waits, meets, completes = actor.waits, actor.meets, actor.completes
            while actor.position < len(waits):
                place = actor.position
                if waits[place] or meets[place] != _NOTHING:
                    fact = self.obstacle(actor)
                    if fact != _NOTHING:
                        self.sleepers.setdefault(fact, []).append(number)
                        break
                actor.position = place + 1
                actor.has_met = False
                if completes[place] != _NOTHING:
                    self._complete(completes[place])

    def obstacle(self, actor: _ActorWaits) -> int:
        """Return a fact that an actor's current action lacks; if only members of a meeting are missing, join it."""
        for fact in actor.waits[actor.position]:
            if self.missing[fact]:
                return fact
        meets = actor.meets[actor.position]
        if meets != _NOTHING:
            if not actor.has_met:
                actor.has_met = True
                self._complete(meets)
            if self.missing[meets]:
                return meets
        return _NOTHING

    def absentee(self, fact: int) -> tuple[int, int]:
        """Return an actor that has not done its part of ``fact``, and the index of the action that does it."""
        for number, actor in enumerate(self.actors):
            for index in range(actor.position, len(actor.waits)):
                joins = actor.meets[index] == fact and not (actor.has_met and index == actor.position)
                if joins or actor.completes[index] == fact:
                    return number, index
        raise AssertionError(fact)

    def _complete(self, fact: int) -> None:
        self.missing[fact] -= 1
        if not self.missing[fact]:
            self.awake.extend(self.sleepers.pop(fact, ()))


def check_waiting(actors: Sequence[ActorPlan], wiring: Wiring) -> None:
    """Refuse lists that lead into a circle of waiting; each must be complete by itself, shared orders must agree.

    Args:
        actors: the lists, in the order of the graph's actors.
        wiring: the graph.

    Raises:
        PlanError: its text follows the circle: who waits where, for whom, and until which action.
    """
    facts = _Facts()
    waits = [_actor(plan, number, facts, wiring) for number, plan in enumerate(actors)]
    run = _WaitingRun(actors=waits, missing=facts.missing)
    run.run()
    stuck = next((number for number, actor in enumerate(run.actors) if not actor.is_done), None)
    if stuck is not None:
        raise _circle(run, actors, stuck)


def _actor(plan: ActorPlan, number: int, facts: _Facts, wiring: Wiring) -> _ActorWaits:
    actor = _ActorWaits()
    bundles: dict[tuple[str, bool, int], int] = {}
    """By edge, direction and microbatch, the fact that its message was sent, once it is posted here."""
    targets, feeding = wiring.targets, wiring.feeding
    for action in plan.actions:
        kind, stage, edge, served = action.kind, (action.module, action.stage), action.edge or "", action.microbatches
        if kind == "receive":
            gradient = targets[edge] != stage
            message = facts.of((edge, gradient, served))
            actor.add(completes=facts.part(message))
            for microbatch in served:
                bundles[edge, gradient, microbatch] = message + 1
        elif kind == "send":
            message = facts.of((edge, targets[edge] == stage, served))
            actor.add(waits=(message,), completes=facts.part(message + 1))
        elif kind == "reduce":
            actor.add(meets=facts.part(facts.of((kind, edge or stage))))
        else:
            waits = tuple(
                [
                    bundles[name, gradient, microbatch]
                    for name, gradient in feeding.get((kind, *stage), ())
                    for microbatch in served
                ]
            )
            meets = _NOTHING
            if wiring.gathers(action):
                met = wiring.meeting(action.stage_id, number)
                meets = facts.part(facts.of((kind, stage, served, met)))
            actor.add(waits=waits, meets=meets)
    return actor


def _circle(run: _WaitingRun, plans: Sequence[ActorPlan], stuck: int) -> PlanError:
    path: list[int] = []
    while stuck not in path:
        path.append(stuck)
        stuck = run.absentee(run.obstacle(run.actors[stuck]))[0]
    circle = path[path.index(stuck) :]
    index = run.actors[circle[0]].position
    return PlanError(
        place_text(plans[circle[0]].ranks, index, plans[circle[0]].actions[index]),
        expected="no circle of waiting",
        got="; ".join(_waits(run, plans, circle)),
        fix="Have one of them come to what the other waits for earlier in its list.",
    )


def _waits(run: _WaitingRun, plans: Sequence[ActorPlan], circle: Sequence[int]) -> Iterator[str]:
    """Yield for each actor of the circle its position, for whom it waits and until which action."""
    for number in circle:
        actor = run.actors[number]
        other, goal = run.absentee(run.obstacle(actor))
        yield (
            f"{ranks_text(plans[number].ranks)} at action {actor.position} "
            f"({action_text(plans[number].actions[actor.position])}) "
            f"until {ranks_text(plans[other].ranks)} come to action {goal} ({action_text(plans[other].actions[goal])})"
        )
