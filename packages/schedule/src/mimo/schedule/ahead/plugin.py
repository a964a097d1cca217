"""The ``ahead`` schedule: encoders run ahead of the modules that they feed and fill their gaps, within a memory budget.

It treats encoders and language models the same: tasks of all stages compete for the actors that hold them, backwards
with weight gradients are split, and actors without collectives between them work on a stage at their own times. The
result is the shortest of many placements (`rules`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import attrs

from mimo.hooks import ConfigError, hookimpl, must_be
from mimo.schedule.ahead.budget import smallest_budget
from mimo.schedule.ahead.rules import shortest
from mimo.schedule.ahead.task_builder import tasks_of
from mimo.schedule.ahead.tasks import Placed, Task, TaskGraph
from mimo.schedule.plan import Costs, Plan, ScheduleSpec, Timed, assemble
from mimo.topology import ModuleGraph

_MOMENT = 1e-12
"""Of the step, by which tasks of no time come one after the other."""


@attrs.frozen(kw_only=True)
class Ahead:
    """Configuration of the ``ahead`` schedule.

    Args:
        budget: bytes of activations that a rank may hold at once, of all its modules together; 0 sets no limit.
            They are counted along the rank's list, where a stage without backward frees what it holds when its forward
            ends. `simulate` counts its rows until their message has arrived, so it may show more than the budget: the
            rows of frozen stages that wait for those of other lanes, or are in transit.
    """

    budget: int = attrs.field(
        default=0, validator=must_be("bytes, or 0 for no limit", lambda budget: budget >= 0, where="schedule")
    )


def generate(graph: ModuleGraph, microbatches: int, config: Ahead, costs: Costs) -> Plan:
    """Return a short plan of ``microbatches`` microbatches over ``graph`` within the budget.

    Activations count as `peak_activations` counts them: from the start of a forward to the end of its backward, the
    part that a weight gradient needs until its end, and what is recomputed during the first part of a backward; without
    a backward, until its end. For a module with ``prefetch`` the rows of two steps are reserved throughout, up
    to twice what it holds at any time.

    Raises:
        ConfigError: there is no microbatch, or the budget is less than what this schedule reserves for microbatches
            one after the other; the text gives that number. Another order might need less.
    """
    assert isinstance(config, Ahead), config
    if microbatches < 1:
        raise ConfigError("microbatches", expected="1 or more in a step", got=repr(microbatches))
    tasks = tasks_of(graph, microbatches, costs.trained(graph))
    if config.budget and (smallest := smallest_budget(tasks)) > config.budget:
        raise ConfigError(
            "schedule.budget",
            expected=f"{smallest} bytes or more, which ahead reserves on a rank for microbatches that go in turn",
            got=repr(config.budget),
            fix=f"Set it to {smallest} or more, or to 0 for no limit.",
        )
    return assemble("ahead", graph, microbatches, _timed(tasks, shortest(tasks, config.budget)))


def _timed(tasks: TaskGraph, placed: Placed) -> Iterator[Timed]:
    """Yield the tasks at their times, each later by its index in the order, so that all take some."""
    joined = _joined(tasks, placed)
    left_out = {number for numbers in joined.values() for number in numbers}
    moment = _MOMENT * (placed.end or 1)
    for index, number in enumerate(placed.order):
        task = tasks.tasks[number]
        if number not in left_out:
            finish = max(placed.starts[part] + tasks.tasks[part].seconds for part in (number, *joined.get(number, ())))
            yield Timed(
                kind="backward" if number in joined else task.kind,
                stage=task.stage,
                microbatches=task.microbatches,
                start=placed.starts[number] + index * moment,
                finish=finish + (index + 0.5) * moment,
                actors=task.actors,
            )


def _joined(tasks: TaskGraph, placed: Placed) -> Mapping[int, Collection[int]]:
    """Return split backwards whose parts follow each other on every actor, if nobody waits for the input gradient."""
    following: dict[int, set[int]] = {number: set() for number, task in enumerate(tasks.tasks) if _is_first(task)}
    last: dict[int, int] = {}
    for number in placed.order:
        for actor in tasks.tasks[number].actors:
            if (behind := following.get(last.get(actor, -1))) is not None:
                behind.add(number)
            last[actor] = number
    result: dict[int, Collection[int]] = {}
    for number, behind in following.items():
        later = [other for other, _ in tasks.after[number]]
        if all(tasks.tasks[other].stage == tasks.tasks[number].stage for other in later):
            weights = [other for other in later if tasks.tasks[other].kind == "weight-gradient"]
            if behind == set(weights):
                result[number] = weights
    return result


def _is_first(task: Task) -> bool:
    """Return whether a task is the first part of a split backward."""
    return task.kind == "input-gradient"


@hookimpl
def mimo_register_schedules() -> list[ScheduleSpec]:
    """Register ``ahead``."""
    return [ScheduleSpec(name="ahead", config=Ahead, generate=generate)]
