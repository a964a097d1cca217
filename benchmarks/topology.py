"""Seconds to lay 16,384 ranks out with four modules, without torch: made, validated, and every group enumerated.

``nox -s bench -- topology [--rounds N]`` prints a table of what is done, and as its last line one JSON object. There is
no usual way to set beside it: torch makes groups by talking, one at a time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from mimo.topology import AXES, EXPERT_AXES, Grid, Module, ModuleGraph, needed_groups

WORLD = 16_384
GRIDS: Mapping[str, Mapping[str, Any]] = {
    "vision": {"ranks": range(4096), "dp": 512, "cp": 2, "tp": 4},
    "audio": {"ranks": range(4096, 6144), "dp": 1024, "tp": 2},
    "radio": {"ranks": range(2048, 6144, 2), "pp": 2, "dp": 1024},  # overlaps both
    "language": {"ranks": range(WORLD), "pp": 16, "dp": 16, "cp": 8, "tp": 8, "ep": 64, "etp": 2},
}


def make() -> ModuleGraph:
    """Return the four modules, each size and name checked."""
    grids = [Grid(name=name, **sizes) for name, sizes in GRIDS.items()]
    return ModuleGraph(
        modules=tuple(
            Module(grid=grid, trains=(True,) * grid.pp, tied=grid.name == "language", experts=grid.name == "language")
            for grid in grids
        ),
        arrows=tuple((name, "language") for name in GRIDS if name != "language"),
    )


def every_group(graph: ModuleGraph) -> int:
    """Enumerate the groups along every set of axes of both views of every module, needed or not."""
    sizes = range(1, len(AXES) + 1)
    views = {axes for view in (AXES, EXPERT_AXES) for size in sizes for axes in itertools.combinations(view, size)}
    return sum(len(module.grid.groups(axes)) for module in graph.modules for axes in views)


def every_role(graph: ModuleGraph) -> int:
    """Find for every rank its coordinates in each of its modules, in both views."""
    experts = graph.by_name["language"].grid
    return sum(len(graph.role(rank).places) + (experts.expert_coordinates(rank).ep >= 0) for rank in range(WORLD))


def own_groups(graph: ModuleGraph) -> int:
    """Find for every rank its tensor group, as every rank does for itself alone."""
    return sum(len(module.grid.group_of(rank, ("tp",))) for module in graph.modules for rank in module.grid.ranks)


WORK: Mapping[str, Callable[[ModuleGraph], int]] = {
    "modules and graph": lambda graph: len(graph.modules),
    "edges, and the actors that share a plan": lambda graph: len(graph.edges) + len(graph.actors),
    "groups that are needed": lambda graph: len(needed_groups(graph)),
    "groups along all sets of axes": every_group,
    "roles of all ranks": every_role,
    "tensor groups of all ranks": own_groups,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="times that all is done, of which the median counts")
    rounds = parser.parse_args().rounds
    totals: list[float] = []
    for turn in range(rounds):
        start = before = time.perf_counter()
        graph = make()
        for what, work in WORK.items():
            found, now = work(graph), time.perf_counter()
            if turn == 0:
                print(f"{what}: {found:,} in {(now - before) * 1e3:.1f} ms")
            before = now
        totals.append(time.perf_counter() - start)
    loaded = sorted({"torch", "numpy"} & sys.modules.keys())
    if loaded:
        sys.exit(f"{' and '.join(loaded)} came along, which planning must not need")
    what = f"seconds, {WORLD:,} ranks and {len(GRIDS)} modules, everything enumerated"
    result = {
        "bench": "topology",
        "ratios": {what: statistics.median(totals)},
        "aims": {what: ["<=", 1.0]},
        "runs": rounds,
        "spread": {what: [min(totals), max(totals)]},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
