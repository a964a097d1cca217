"""The rules by which ``ahead`` places a step, and how a small step is searched for a shorter placement.

The rules differ in what goes first (what lies on the longest path, backwards before forwards, weight gradients last),
in whether a filler is put off for what is about to come, and in how many microbatches may be in flight.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

import attrs

from mimo.schedule.ahead.dispatch import PriorityRule, dispatch
from mimo.schedule.ahead.improve import Improver
from mimo.schedule.ahead.tasks import Placed, TaskGraph
from mimo.schedule.plan import ActionKind, stages_to_sink
from mimo.topology import StageId

_PLACED = 70_000
"""Tasks that all rules together may place; at least three rules are tried."""
_SEARCHED = 3_000
"""Tasks of a step up to which a shorter placement is searched for."""
_EFFORT = 600_000
"""Tasks that a search may place in given orders, about half a second of work; by a rule it counts `_BY_RULE` times."""
_BY_RULE = 10
_DRAWN = 300
"""Rules that a search draws."""
_ELITE = 6
"""Rules that it draws from."""
_TURN: Mapping[ActionKind, int] = {"input-gradient": 0, "backward": 0, "forward": 1, "weight-gradient": 2, "reduce": 2}


@attrs.frozen(kw_only=True, eq=False)
class _Candidate:
    """A placement, the rule that made it, and the weights that the rule's keys come from, the lowest first."""

    weights: Sequence[float]
    rule: PriorityRule
    placed: Placed


def shortest(tasks: TaskGraph, budget: int) -> Placed:
    """Return the shortest placement that rules and search find; of equally short ones what keeps least.

    Everything is decided by the tasks and the budget alone: effort is counted in tasks, and draws start from one seed.

    Args:
        tasks: of the step.
        budget: bytes that each actor may keep, 0 for any.
    """
    enough = tasks.bound * (1 + 1e-9)
    found: list[_Candidate] = []
    count = max(3, _PLACED // len(tasks.tasks))
    for weights, patience, limits in islice(_choices(tasks), count):
        found.append(_try(tasks, budget, weights, patience, limits))
        if found[-1].placed.end <= enough:
            break
    found.sort(key=lambda one: (one.placed.end, tasks.peak(one.placed.order)))
    if found[0].placed.end <= enough or len(tasks.tasks) > _SEARCHED:
        return found[0].placed
    return _search(tasks, budget, found[:_ELITE], enough)


def _choices(tasks: TaskGraph) -> Iterator[tuple[Sequence[float], float, Mapping[StageId, int] | None]]:
    """Yield weights, patience and limits of the rules, those that keep less first."""
    longest = max(tasks.tails) or 1
    path = [1 - tail / longest for tail in tasks.tails]
    turn = [_TURN[task.kind] for task in tasks.tasks]
    place = [(task.microbatches or (tasks.microbatches,))[0] / tasks.microbatches for task in tasks.tasks]
    weights = (
        path,
        [one / 3 + way for one, way in zip(turn, path, strict=True)],
        [2 * (one > 1) + way for one, way in zip(turn, path, strict=True)],
        [2 * one + first + way / 100 for one, first, way in zip(turn, place, path, strict=True)],
        [2 * (one > 1) + first + way / 100 for one, first, way in zip(turn, place, path, strict=True)],
        [first + way / 3 for first, way in zip(place, path, strict=True)],
    )
    once = stages_to_sink(tasks.graph)
    twice = {stage: 2 * count for stage, count in once.items()}
    for patience in (1, 0, 0.5):
        for chosen in weights:
            for limits in (once, twice, None):
                yield chosen, patience, limits


def _try(
    tasks: TaskGraph, budget: int, weights: Sequence[float], patience: float, limits: Mapping[StageId, int] | None
) -> _Candidate:
    keys = [0] * len(weights)
    for key, number in enumerate(sorted(range(len(weights)), key=weights.__getitem__)):
        keys[number] = key
    rule = PriorityRule(keys=keys, patience=patience, limits=limits)
    return _Candidate(weights=weights, rule=rule, placed=dispatch(tasks, rule, budget))


def _search(tasks: TaskGraph, budget: int, elite: list[_Candidate], enough: float) -> Placed:
    """Draw rules near the best ones, then move tasks in what the best of all have made."""
    choice = random.Random(0)
    effort = _EFFORT // 2 // (_BY_RULE * len(tasks.tasks))
    kinds = sorted({(task.kind, task.stage) for task in tasks.tasks})
    first = list(elite)
    for _ in range(min(_DRAWN, effort)):
        if elite[0].placed.end <= enough:
            return elite[0].placed
        near = choice.choice(elite if choice.random() < 0.7 else first)  # noqa: PLR2004 - sometimes from the beginning
        patience = choice.choice((near.rule.patience,) * 12 + (0, 0, 0.5, 1))
        limits = near.rule.limits if choice.random() < 0.9 else None  # noqa: PLR2004 - and rarely without
        one = _try(tasks, budget, _varied(tasks, near.weights, kinds, choice), patience, limits)
        elite = sorted((*elite, one), key=lambda found: found.placed.end)[:_ELITE]
    best = elite[0].placed
    for found in elite[:2]:
        best = min(Improver(tasks, budget, _EFFORT // 4).improve(found.placed, enough), best, key=_end)
    return best


_end: Callable[[Placed], float] = lambda placed: placed.end  # noqa: E731 - a key


def _varied(
    tasks: TaskGraph, weights: Sequence[float], kinds: Sequence[tuple[ActionKind, StageId]], choice: random.Random
) -> Sequence[float]:
    """Return weights with some stages' forwards or backwards preferred or put back, and a little noise."""
    much, little = choice.choice((0.05, 0.1, 0.2, 0.4)), choice.choice((0, 0.02, 0.05, 0.1))
    shift = {kind: much * (choice.random() - 0.5) * (choice.random() < 0.5) for kind in kinds}  # noqa: PLR2004 - half
    return [
        weight + shift[task.kind, task.stage] + little * (choice.random() - 0.5)
        for weight, task in zip(weights, tasks.tasks, strict=True)
    ]
