"""Proof that no actors wait for each other in a circle, by running the lists with the most waiting that can be.

What waits for what is fixed by the plan, so one run decides for all: let actors advance in any order until none can;
if lists are left, their actors wait in a circle. Waits are taken between whole actors. Those of single ranks, whatever
the routes and groups, are some of these and so form no circle either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import attrs

from mimo.hooks import PlanError
from mimo.schedule._plan import Action, ActorPlan
from mimo.schedule._texts import action_text, place_text, ranks_text
from mimo.schedule._wiring import Channel, Wiring

_Fact = tuple[object, ...]
"""What an actor can wait for: that all receivers posted a message, all senders sent it, or all members have met."""


@attrs.frozen(kw_only=True)
class _Step:
    """An action as waiting sees it: it waits for facts, then meets others, and when it is over tells a fact."""

    waits: tuple[_Fact, ...] = ()
    meets: _Fact | None = None
    tells: _Fact | None = None


@attrs.define(kw_only=True, eq=False)
class _Run:
    """The lists while they run: where each actor stands, and which facts lack whom."""

    lists: Sequence[Sequence[_Step]]
    tellers: dict[_Fact, dict[int, int]]
    missing: dict[_Fact, int]
    positions: list[int]
    has_met: list[bool]
    sleepers: dict[_Fact, list[int]] = attrs.field(factory=dict)
    awake: deque[int] = attrs.field(factory=deque)

    @classmethod
    def of(cls, lists: Sequence[Sequence[_Step]]) -> _Run:
        """Return the run before its first action."""
        tellers: dict[_Fact, dict[int, int]] = {}
        for number, steps in enumerate(lists):
            for index, step in enumerate(steps):
                for fact in (step.meets, step.tells):
                    if fact is not None:
                        tellers.setdefault(fact, {})[number] = index
        return cls(
            lists=lists,
            tellers=tellers,
            missing={fact: len(found) for fact, found in tellers.items()},
            positions=[0] * len(lists),
            has_met=[False] * len(lists),
            awake=deque(range(len(lists))),
        )

    def run(self) -> None:
        """Advance every actor as far as it goes."""
        while self.awake:
            number = self.awake.popleft()
            while self.positions[number] < len(self.lists[number]):
                fact = self.obstacle(number)
                if fact is not None:
                    self.sleepers.setdefault(fact, []).append(number)
                    break
                step = self.lists[number][self.positions[number]]
                self.positions[number] += 1
                self.has_met[number] = False
                if step.tells is not None:
                    self._tell(step.tells)

    def obstacle(self, number: int) -> _Fact | None:
        """Return what the present action of actor ``number`` lacks; if only others at its meeting, it is there now."""
        step = self.lists[number][self.positions[number]]
        for fact in step.waits:
            if self.missing[fact]:
                return fact
        if step.meets is None:
            return None
        if not self.has_met[number]:
            self.has_met[number] = True
            self._tell(step.meets)
        return step.meets if self.missing[step.meets] else None

    def absentee(self, fact: _Fact) -> tuple[int, int]:
        """Return an actor that ``fact`` lacks, and the index of the action that it is to reach."""
        for number, index in self.tellers[fact].items():
            at_meeting = self.has_met[number] and self.lists[number][index].meets == fact
            if self.positions[number] < index or (self.positions[number] == index and not at_meeting):
                return number, index
        raise AssertionError(fact)

    def _tell(self, fact: _Fact) -> None:
        self.missing[fact] -= 1
        if not self.missing[fact]:
            self.awake.extend(self.sleepers.pop(fact, ()))


def check_waiting(actors: Sequence[ActorPlan], wiring: Wiring) -> None:
    """Refuse lists that lead into a circle of waiting; each must be complete by itself, shared orders must agree.

    Args:
        actors: the lists, in the order of the graph's actors.
        wiring: the graph.

    Raises:
        PlanError: its text goes once round the circle, and says who waits where for whom to reach what.
    """
    bundles = {
        (wiring.channel(action), microbatch): action.microbatches
        for actor in actors
        for action in actor.actions
        if action.kind == "receive"
        for microbatch in action.microbatches
    }
    run = _Run.of([[_step(action, bundles, wiring) for action in actor.actions] for actor in actors])
    run.run()
    stuck = next((number for number, steps in enumerate(run.lists) if run.positions[number] < len(steps)), None)
    if stuck is not None:
        raise _circle(run, actors, stuck)


def _step(action: Action, bundles: dict[tuple[Channel, int], tuple[int, ...]], wiring: Wiring) -> _Step:
    stage = action.stage_id
    if action.kind == "receive":
        return _Step(tells=("posted", wiring.channel(action), action.microbatches))
    if action.kind == "send":
        message = (wiring.channel(action), action.microbatches)
        return _Step(waits=(("posted", *message),), tells=("sent", *message))
    if action.kind == "reduce":
        return _Step(meets=("reduce", action.edge or stage))
    channels = [(edge.name, stage) for edge in wiring.feeds(action)]
    return _Step(
        waits=tuple(("sent", channel, bundles[channel, m]) for channel in channels for m in action.microbatches),
        meets=(action.kind, stage, action.microbatches) if wiring.gathers(stage) else None,
    )


def _circle(run: _Run, actors: Sequence[ActorPlan], stuck: int) -> PlanError:
    path: list[int] = []
    while stuck not in path:
        path.append(stuck)
        fact = run.obstacle(stuck)
        assert fact is not None, stuck
        stuck = run.absentee(fact)[0]
    circle = path[path.index(stuck) :]
    index = run.positions[circle[0]]
    return PlanError(
        place_text(actors[circle[0]].ranks, index, actors[circle[0]].actions[index]),
        expected="no circle of waiting",
        got="; ".join(_waits(run, actors, circle)),
        fix="Have one of them come to what the other waits for earlier in its list.",
    )


def _waits(run: _Run, actors: Sequence[ActorPlan], circle: Sequence[int]) -> Iterator[str]:
    """Yield for each actor of the circle where it stands and whom it waits for to reach what."""
    for number in circle:
        fact = run.obstacle(number)
        assert fact is not None, number
        other, goal = run.absentee(fact)
        here = actors[number].actions[run.positions[number]]
        yield (
            f"{ranks_text(actors[number].ranks)} at action {run.positions[number]} ({action_text(here)}) "
            f"until {ranks_text(actors[other].ranks)} come to action {goal} "
            f"({action_text(actors[other].actions[goal])})"
        )
