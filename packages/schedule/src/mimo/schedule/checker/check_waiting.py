"""Proof that no actors wait for each other in a circle, by running the lists with as much waiting as possible.

Nothing is assumed to happen beside anything else: an actor does one action at a time, in the order of its list, and
comes to the next only when this one is over. A message is over when all its senders and receivers have come to it, as
a collective is with its members. What runs on real streams and communicators waits for less.
The plan fixes which action waits for which, so one run decides for all: let actors advance in any order until none can;
if lists are left, their actors wait in a circle. Waits are modelled between actors. The waits of single
ranks, for any routes and groups, are a subset of these, so they form no circle either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence

import attrs

from mimo.hooks import PlanError
from mimo.schedule.plan import Action, ActorPlan, Wiring, action_text, place_text, ranks_text

_NOTHING = -1


@attrs.define(kw_only=True, eq=False)
class _Meetings:
    """Messages and collectives, numbered; ``missing`` counts for each the actors that have not come to it."""

    missing: list[int] = attrs.field(factory=list)
    numbers: dict[Hashable, int] = attrs.field(factory=dict)

    def join(self, key: Hashable) -> int:
        """Add an actor that has to come to a meeting, and return its number."""
        number = self.numbers.setdefault(key, len(self.missing))
        if number == len(self.missing):
            self.missing.append(0)
        self.missing[number] += 1
        return number


@attrs.define(kw_only=True, eq=False)
class _ActorWaits:
    """The meeting of each action of an actor's list, or `_NOTHING`, and its position."""

    meets: Sequence[int]
    position: int = 0

    @property
    def is_done(self) -> bool:
        """Whether its list is at its end."""
        return self.position == len(self.meets)


@attrs.define(kw_only=True, eq=False)
class _WaitingRun:
    """The lists while they run, and which actors have come to which meeting."""

    actors: Sequence[_ActorWaits]
    missing: list[int]
    present: dict[int, list[int]] = attrs.field(factory=dict)

    def run(self) -> None:
        """Advance every actor as far as possible."""
        awake = deque(range(len(self.actors)))
        while awake:
            number = awake.popleft()
            actor = self.actors[number]
            meets, stop = actor.meets, len(actor.meets)
            while actor.position < stop:
                meeting = meets[actor.position]
                if meeting != _NOTHING:
                    self.missing[meeting] -= 1
                    if self.missing[meeting]:
                        self.present.setdefault(meeting, []).append(number)
                        break
                    for other in self.present.pop(meeting, ()):
                        self.actors[other].position += 1
                        awake.append(other)
                actor.position += 1

    def absentee(self, meeting: int) -> tuple[int, int]:
        """Return an actor that has not come to a meeting, and the index of its action there."""
        for number, actor in enumerate(self.actors):
            for index in range(actor.position, len(actor.meets)):
                if actor.meets[index] == meeting and number not in self.present[meeting]:
                    return number, index
        raise AssertionError(meeting)


def check_waiting(actors: Sequence[ActorPlan], wiring: Wiring) -> None:
    """Refuse lists that lead into a circle of waiting; each must be complete by itself, shared orders must agree.

    Args:
        actors: the lists, in the order of the graph's actors.
        wiring: the graph.

    Raises:
        PlanError: its text follows the circle: who waits where, for whom, and until which action.
    """
    meetings = _Meetings()
    waits = [_actor(plan, number, meetings, wiring) for number, plan in enumerate(actors)]
    run = _WaitingRun(actors=waits, missing=meetings.missing)
    run.run()
    stuck = next((number for number, actor in enumerate(run.actors) if not actor.is_done), None)
    if stuck is not None:
        raise _circle(run, actors, stuck)


def _actor(plan: ActorPlan, number: int, meetings: _Meetings, wiring: Wiring) -> _ActorWaits:
    meets: list[int] = []
    stages = wiring.graph.actors[number].stages
    for index, action in enumerate(plan.actions):
        kind, stage, edge, served = action.kind, (action.module, action.stage), action.edge or "", action.microbatches
        meeting = _NOTHING
        if kind in ("send", "receive"):
            source, target = wiring.edges[edge].source, wiring.targets[edge]
            other = source if stage == target else target
            if kind == "receive" and other in stages:  # it comes to the message with its send
                _require_batch(plan, index, attrs.evolve(action, kind="send", module=other.module, stage=other.stage))
            else:
                meeting = meetings.join((edge, (stage == target) == (kind == "send"), served))
        elif kind == "reduce":
            meeting = meetings.join((kind, edge or stage))
        elif wiring.gathers(action):
            meeting = meetings.join((kind, stage, served, wiring.meeting(action.stage_id, number)))
        meets.append(meeting)
    return _ActorWaits(meets=meets)


def _require_batch(plan: ActorPlan, index: int, send: Action) -> None:
    """Refuse a receive that is not followed by the same actor's send of the same message."""
    if plan.actions[index + 1 : index + 2] != (send,):
        following = action_text(plan.actions[index + 1]) if index + 1 < len(plan.actions) else "the end of the list"
        raise PlanError(
            place_text(plan.ranks, index, plan.actions[index]),
            expected=f"{action_text(send)} next: a rank at both ends of an edge sends and receives in one batch",
            got=following,
            fix="List the receive right before the send, behind the computation that makes the rows.",
        )


def _circle(run: _WaitingRun, plans: Sequence[ActorPlan], stuck: int) -> PlanError:
    path: list[int] = []
    while stuck not in path:
        path.append(stuck)
        stuck = run.absentee(_meeting_of(run, stuck))[0]
    circle = path[path.index(stuck) :]
    index = run.actors[circle[0]].position
    return PlanError(
        place_text(plans[circle[0]].ranks, index, plans[circle[0]].actions[index]),
        expected="no circle of waiting",
        got="; ".join(_waits(run, plans, circle)),
        fix="Have one of them come to what the other waits for earlier in its list.",
    )


def _meeting_of(run: _WaitingRun, stuck: int) -> int:
    actor = run.actors[stuck]
    return actor.meets[actor.position]


def _waits(run: _WaitingRun, plans: Sequence[ActorPlan], circle: Sequence[int]) -> Iterator[str]:
    """Yield for each actor of the circle its position, for whom it waits and until which action."""
    for number in circle:
        actor = run.actors[number]
        other, goal = run.absentee(_meeting_of(run, number))
        yield (
            f"{ranks_text(plans[number].ranks)} at action {actor.position} "
            f"({action_text(plans[number].actions[actor.position])}) "
            f"until {ranks_text(plans[other].ranks)} come to action {goal} ({action_text(plans[other].actions[goal])})"
        )
