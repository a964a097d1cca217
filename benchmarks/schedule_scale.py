"""CPU seconds to generate, check and simulate the plan of a step for 1,024 ranks, and how they grow with its actions.

``nox -s bench -- schedule_scale [--rounds N]`` prints a table, and as its last line one JSON object. There is no usual
way to set beside it. Its shapes: a language model of 16 stages with encoders on the same ranks, where ranks of the same
role share a list, and a pipeline of 1,024 stages, in which every rank has a list of its own. With seven modules, four
are encoders, and two are fed by the language model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable

from mimo.hooks import discover
from mimo.schedule import SCHEDULES, Costs, Plan, check, simulate
from mimo.topology import Grid, Module, ModuleGraph

WORLD = 1024
MICROBATCHES = (16, 32, 64)


def _module(grid: Grid, *, chunks: int = 1) -> Module:
    return Module(grid=grid, trains=(True,) * grid.pp * chunks, chunks=chunks)


def three_modules(chunks: int) -> ModuleGraph:
    """Return vision on all ranks and audio on half of them, both feeding a language model over all."""
    language = Grid(name="language", ranks=range(WORLD), pp=16, dp=8, tp=8)
    return ModuleGraph(
        modules=(
            _module(Grid(name="vision", ranks=range(WORLD), dp=WORLD)),
            _module(Grid(name="audio", ranks=range(WORLD // 2), pp=2, dp=WORLD // 8, tp=2)),
            _module(language, chunks=chunks),
        ),
        arrows=(("vision", "language"), ("audio", "language")),
    )


def seven_modules(chunks: int) -> ModuleGraph:
    """Return four encoders, on all ranks or a quarter of them, and two generators that the language model feeds."""
    quarters = [range(first, first + WORLD // 4) for first in range(0, WORLD, WORLD // 4)]
    encoders = [
        Grid(name="vision", ranks=range(WORLD), dp=WORLD),
        *(
            Grid(name=name, ranks=ranks, pp=2, dp=WORLD // 16, tp=2)
            for name, ranks in zip(("audio", "radio", "video"), quarters, strict=False)
        ),
    ]
    generators = [
        Grid(name="drawer", ranks=range(WORLD // 2, WORLD), pp=2, dp=WORLD // 8, tp=2),
        Grid(name="talker", ranks=range(WORLD), dp=WORLD // 2, tp=2),
    ]
    language = Grid(name="language", ranks=range(WORLD), pp=16, dp=8, tp=8)
    return ModuleGraph(
        modules=(*map(_module, encoders), _module(language, chunks=chunks), *map(_module, generators)),
        arrows=(
            *((grid.name, "language") for grid in encoders),
            *(("language", grid.name) for grid in generators),
        ),
    )


def one_pipeline(chunks: int) -> ModuleGraph:
    """Return a pipeline of as many stages as there are ranks, times chunks."""
    return ModuleGraph(
        modules=(_module(Grid(name="language", ranks=range(WORLD), pp=WORLD), chunks=chunks),), arrows=()
    )


CASES: tuple[tuple[str, Callable[[int], ModuleGraph], str, int], ...] = (
    ("three modules, 1f1b", three_modules, "1f1b", 1),
    ("three modules, interleaved", three_modules, "interleaved", 2),
    ("three modules, zero-bubble", three_modules, "zero-bubble", 1),
    ("seven modules, 1f1b", seven_modules, "1f1b", 1),
    ("seven modules, interleaved", seven_modules, "interleaved", 2),
    ("seven modules, zero-bubble", seven_modules, "zero-bubble", 1),
    ("seven modules, gpipe", seven_modules, "gpipe", 1),
    ("seven modules, ahead", seven_modules, "ahead", 1),
    ("1,024 stages, 1f1b", one_pipeline, "1f1b", 1),
)
"""What, its graph, schedule and chunks."""


def measure(graph: ModuleGraph, schedule: str, microbatches: int) -> tuple[int, list[float]]:
    """Return how many actions the lists of a plan have, and the CPU seconds to generate, check and simulate it."""
    spec = discover(SCHEDULES).find(schedule, where="schedule.plugin")
    costs = Costs.even(graph)
    times = [time.process_time()]
    plan: Plan = spec.generate(graph, microbatches, spec.config(), costs)
    times.append(time.process_time())
    check(plan, graph)
    times.append(time.process_time())
    simulate(plan, graph, costs)
    times.append(time.process_time())
    seconds = [later - earlier for earlier, later in itertools.pairwise(times)]
    return sum(len(actor.actions) for actor in plan.actors), seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="times that all is done, of which the median counts")
    rounds = parser.parse_args().rounds
    ratios: dict[str, float] = {}
    spread: dict[str, list[float]] = {}
    print("| what | microbatches | actions | generate | check | simulate | microseconds an action |")
    print("|---|---|---|---|---|---|---|")
    for what, make, schedule, chunks in CASES:
        graph, each = make(chunks), []
        for microbatches in MICROBATCHES:
            runs = [measure(graph, schedule, microbatches) for _ in range(rounds)]
            actions, parts = runs[0][0], [statistics.median(run[1][part] for run in runs) for part in range(3)]
            totals = sorted(sum(run[1]) for run in runs)
            each.append([total / actions for total in totals])
            cells = " | ".join(f"{part:.3f}" for part in parts)
            print(f"| {what} | {microbatches} | {actions:,} | {cells} | {sum(parts) / actions * 1e6:.1f} |", flush=True)
        key = f"CPU seconds, {WORLD:,} ranks x {MICROBATCHES[-1]} microbatches: {what}"
        ratios[key], spread[key] = statistics.median(totals), [totals[0], totals[-1]]
        key = f"time an action, {MICROBATCHES[-1]} over {MICROBATCHES[0]} microbatches: {what}"
        ratios[key] = statistics.median(each[-1]) / statistics.median(each[0])
        spread[key] = [each[-1][0] / each[0][-1], each[-1][-1] / each[0][0]]
    loaded = sorted({"torch", "numpy"} & sys.modules.keys())
    if loaded:
        sys.exit(f"{' and '.join(loaded)} came along, which planning must not need")
    aims = {key: ["<=", 3.0 if key.startswith("CPU seconds") else 1.2] for key in ratios}
    aims |= {key: ["<=", 1.0] for key in ratios if key.startswith("CPU seconds") and "seven modules" in key}
    print(json.dumps({"bench": "schedule_scale", "ratios": ratios, "aims": aims, "runs": rounds, "spread": spread}))


if __name__ == "__main__":
    main()
