"""Requirements of schedules on a graph and a number of microbatches; errors give the smallest value that works."""

from __future__ import annotations

import math
from collections.abc import Callable

from mimo.hooks import ConfigError
from mimo.topology import Module, ModuleGraph


def trains(graph: ModuleGraph) -> bool:
    """Return whether anything trains; if nothing does, a step has only forwards, which every schedule accepts."""
    return any(any(module.trains) for module in graph.modules)


def longest_pipeline(graph: ModuleGraph) -> Module:
    """Return the module with the most pipeline ranks; of several, the one nearest to a sink."""
    return max((graph.by_name[name] for name in reversed(graph.order)), key=lambda module: module.grid.pp)


def demand_microbatches(
    graph: ModuleGraph, microbatches: int, fits: Callable[[Module, int], bool], demand: Callable[[Module], str]
) -> None:
    """Refuse a number of microbatches that does not fit some module that runs a backward.

    Args:
        graph: the module graph.
        microbatches: of the step.
        fits: whether a number fits a module. Multiples of its ``pp`` passes, from twice that on, must fit.
        demand: what a module needs, as a noun phrase.

    Raises:
        ConfigError: it names the module, and the smallest number that works for all.
    """
    concerned = {stage.module for stage in graph.stages if graph.runs_backward(stage)}
    modules = [module for module in graph.modules if module.name in concerned]

    def misfit(count: int) -> Module | None:
        return next((module for module in modules if not fits(module, count)), None)

    module = misfit(microbatches)
    if module is None:
        return
    enough = 2 * math.lcm(*(module.grid.pp * module.batch_factor for module in modules))
    smallest = next(count for count in range(1, enough + 1) if misfit(count) is None)
    after = next(count for count in range(microbatches + 1, microbatches + enough + 1) if misfit(count) is None)
    raise ConfigError(
        "microbatches",
        expected=f"{demand(module)} in a step",
        got=repr(microbatches),
        fix=f"The smallest that works is {smallest}"
        + (f", the next from here {after}" if after > smallest else "")
        + "; a step has run.global_batch / (run.micro_batch x lanes).",
    )


def passes_text(module: Module) -> str:
    """Return the unit in which a module counts passes, to follow a number in a text."""
    return "" if module.batch_factor == 1 else f" passes of {module.batch_factor} microbatches"
