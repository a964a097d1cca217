"""How many microbatches a step may have, and the plan for each of these numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mimo.data import microbatch_numbers
from mimo.hooks import ConfigError
from mimo.schedule import Plan
from mimo.topology import ModuleGraph, count_microbatches
from mimo.trainer.config.settings import LANGUAGE, Settings

_TRIES = 1 << 8
"""Numbers from one on that are tried for one that a schedule has a plan for."""


def step_microbatches(settings: Settings, graph: ModuleGraph) -> tuple[int, ...]:
    """Return how many microbatches a step may have, ascending: one number, or by tokens a few.

    Where an encoder works a step ahead, what a step does depends on how many microbatches the next one has: then all
    have as many.

    Raises:
        ConfigError: a sample may be longer than a microbatch, or the batch can't be cut into whole microbatches.
    """
    run, lanes = settings.run, graph.by_name[LANGUAGE].grid.dp
    if not run.batch_tokens:
        if settings.data.longer == "drop":
            raise ConfigError(
                "data.longer",
                expected="'cut' or 'refuse' with run.global_batch, by which each step has as many samples",
                got="'drop'",
                fix="Set run.batch_tokens and run.micro_tokens in its place to leave samples out.",
            )
        return (count_microbatches(global_batch=run.global_batch, micro_batch=run.micro_batch, lanes=lanes),)
    if settings.data.max_tokens > run.micro_tokens:
        raise ConfigError(
            "data.max_tokens",
            expected=f"at most run.micro_tokens = {run.micro_tokens}, as a sample lies in one microbatch",
            got=repr(settings.data.max_tokens),
            fix="Set it lower, or run.micro_tokens higher.",
        )
    numbers = microbatch_numbers(batch_tokens=run.batch_tokens, micro_tokens=run.micro_tokens, lanes=lanes)
    return numbers[-1:] if any(module.prefetch for module in graph.modules) else numbers


def plans_of_steps(numbers: Sequence[int], plan: Callable[[int], Plan], *, exactly: bool) -> tuple[Plan, ...]:
    """Return the plans of steps of these numbers of microbatches, or of the next ones that a schedule has plans for.

    Args:
        numbers: ascending.
        plan: makes and checks that of a number.
        exactly: whether there must be plans for these.

    Raises:
        ConfigError: there are none.
    """
    if exactly:
        return tuple(map(plan, numbers))
    found: list[Plan] = []
    for number in numbers:
        if not found or found[-1].microbatches < number:
            found.append(_next_plan(number, plan))
    return tuple(found)


def _next_plan(number: int, plan: Callable[[int], Plan]) -> Plan:
    for tried in range(number, number + _TRIES):
        try:
            return plan(tried)
        except ConfigError:
            continue
    return plan(number)
