"""The rules by which ``ahead`` places a step, and the search for a shorter placement of a small step.

The rules differ in what goes first (the longest path, backwards before forwards, weight gradients last), in whether a
task is delayed for a more urgent one that is about to arrive, and in how many microbatches may be in flight.
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
"""Tasks that all rules together may place; at least three rules run."""
_SEARCHED = 3_000
"""The largest step, in tasks, for which a search runs."""
_EFFORT = 600_000
"""Tasks that a search may place in given orders, about half a second of work; by a rule it counts `_BY_RULE` times."""
_BY_RULE = 10
_DRAWN = 300
"""Random rules of a search."""
_ELITE = 6
"""Rules that the random ones vary."""
_OTHERS = 4
"""Longer placements from which tasks are moved too: within a tight budget moves from the best ones may lead nowhere."""
_TURN: Mapping[ActionKind, int] = {"input-gradient": 0, "backward": 0, "forward": 1, "weight-gradient": 2, "reduce": 2}


@attrs.frozen(kw_only=True, eq=False)
class _Candidate:
    """A placement, the rule that made it, and the weights from which the rule's keys come, the lowest first."""

    weights: Sequence[float]
    rule: PriorityRule
    placed: Placed


def shortest(tasks: TaskGraph, budget: int) -> Placed:
    """Return the shortest placement that rules and search find; of equally short ones, the one with the least memory.

    The result depends only on the tasks and the budget: effort is counted in tasks, and random choices have one seed.

    Args:
        tasks: of the step.
        budget: bytes that each actor may hold; 0 for no limit.
    """
    enough = tasks.bound * (1 + 1e-9)
    candidates: list[_Candidate] = []
    count = max(3, _PLACED // len(tasks.tasks))
    for weights, patience, limits in islice(_choices(tasks), count):
        candidates.append(_try(tasks, budget, weights, patience, limits))
        if candidates[-1].placed.end <= enough:
            break
    candidates.sort(key=lambda candidate: (candidate.placed.end, tasks.peak(candidate.placed.order)))
    if candidates[0].placed.end <= enough or len(tasks.tasks) > _SEARCHED:
        return candidates[0].placed
    return _search(tasks, budget, candidates, enough)


def _choices(tasks: TaskGraph) -> Iterator[tuple[Sequence[float], float, Mapping[StageId, int] | None]]:
    """Yield weights, patience and limits of the rules, those that need less memory first."""
    longest = max(tasks.tails) or 1
    path = [1 - tail / longest for tail in tasks.tails]
    turn = [_TURN[task.kind] for task in tasks.tasks]
    place = [(task.microbatches or (tasks.microbatches,))[0] / tasks.microbatches for task in tasks.tasks]
    weights = (
        path,
        [late / 3 + way for late, way in zip(turn, path, strict=True)],
        [2 * (late > 1) + way for late, way in zip(turn, path, strict=True)],
        [2 * late + first + way / 100 for late, first, way in zip(turn, place, path, strict=True)],
        [2 * (late > 1) + first + way / 100 for late, first, way in zip(turn, place, path, strict=True)],
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


def _search(tasks: TaskGraph, budget: int, candidates: Sequence[_Candidate], enough: float) -> Placed:
    """Draw rules near the best ones, then move tasks in the best placements; with several fed, in longer ones too."""
    choice = random.Random(0)
    elite = list(candidates[:_ELITE])
    effort = _EFFORT // 2 // (_BY_RULE * len(tasks.tasks))
    kinds = sorted({(task.kind, task.stage) for task in tasks.tasks})
    first = list(elite)
    for _ in range(min(_DRAWN, effort)):
        if elite[0].placed.end <= enough:
            return elite[0].placed
        near = choice.choice(elite if choice.random() < 0.7 else first)  # noqa: PLR2004 - sometimes from the beginning
        patience = choice.choice((near.rule.patience,) * 12 + (0, 0, 0.5, 1))
        limits = near.rule.limits if choice.random() < 0.9 else None  # noqa: PLR2004 - and rarely without
        candidate = _try(tasks, budget, _varied(tasks, near.weights, kinds, choice), patience, limits)
        elite = sorted((*elite, candidate), key=lambda candidate: candidate.placed.end)[:_ELITE]
    best = elite[0].placed
    for candidate in elite[:2]:
        best = min(Improver(tasks, budget, _EFFORT // 4).improve(candidate.placed, enough), best, key=_end)
    if len({fed for _, fed in tasks.graph.arrows}) <= 1:  # of 330 such graphs one had a shorter plan among the longer
        return best
    longer = list({candidate.placed.end: candidate for candidate in candidates}.values())[1:]  # one of each length
    for candidate in longer[:: max(1, -(-len(longer) // _OTHERS))]:
        if best.end > enough:
            best = min(best, Improver(tasks, budget, _EFFORT // 8).improve(candidate.placed, enough), key=_end)
    return best


_end: Callable[[Placed], float] = lambda placed: placed.end  # noqa: E731 - a key


def _varied(
    tasks: TaskGraph, weights: Sequence[float], kinds: Sequence[tuple[ActionKind, StageId]], choice: random.Random
) -> Sequence[float]:
    """Return weights with some stages' forwards or backwards preferred or postponed, and a little noise."""
    much, little = choice.choice((0.05, 0.1, 0.2, 0.4)), choice.choice((0, 0.02, 0.05, 0.1))
    shift = {kind: much * (choice.random() - 0.5) * (choice.random() < 0.5) for kind in kinds}  # noqa: PLR2004 - half
    return [
        weight + shift[task.kind, task.stage] + little * (choice.random() - 0.5)
        for weight, task in zip(weights, tasks.tasks, strict=True)
    ]
