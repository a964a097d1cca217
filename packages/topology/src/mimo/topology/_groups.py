"""The groups of ranks that a graph of modules needs: what each is for, each distinct one once, in one global order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from mimo.topology._graph import Module, ModuleGraph, StageId
from mimo.topology._grid import Grid

DATA_AXES = ("dp", "cp")
"""Axes along which every parameter is replicated while the work is not."""
ROW_AXES = ("cp", "tp")
"""Axes over which the rows of one lane may be split."""
DATA, REPLICA = "data", "replica"
"""Names of mesh axes: of the lanes over which a copy of a parameter is spread, and of those that hold its copies."""


def needed_groups(graph: ModuleGraph) -> tuple[tuple[int, ...], ...]:
    """Return the rank sets, of two ranks or more, that a graph needs a group for: each once, in one order.

    Those are, for each grid, its tensor groups, its context groups, its data groups, data and tensor ranks together
    (gradients of which a tensor rank computes only a part), for a tied module the pairs of first and last stage, for
    one with experts the ranks that share the rows of a lane, and the groups of the expert view, and where a copy of a
    parameter is spread over some of its lanes only, these and the ranks that hold copies.
    """
    found: dict[tuple[int, ...], None] = {}
    for module in graph.modules:
        axes = [("tp",), ("cp",), DATA_AXES, (*DATA_AXES, "tp")]
        if module.experts:
            axes += [ROW_AXES, ("ep",), ("etp",), ("ep", "etp"), ("edp",)]
        for along in axes:
            found.update(dict.fromkeys(module.grid.groups(along)))
        if module.tied_stages:
            found.update(dict.fromkeys(tied_pairs(module.grid)))
        for split in itertools.chain.from_iterable(_spread_lanes(module)):
            found.update(dict.fromkeys(split))
    return tuple(group for group in found if len(group) > 1)


def gradient_groups(graph: ModuleGraph) -> tuple[tuple[StageId, tuple[int, ...]], ...]:
    """Return which stages need a group for sums of their gradients alone, and of which ranks: in one order.

    Where gradients are summed while layers compute, ranks come to a sum at different places among the messages of
    layers, and, as each has its own order of computations, among the sums of other stages.
    """
    found: dict[tuple[StageId, tuple[int, ...]], None] = {}
    for module in graph.modules:
        if "sums" not in module.overlaps:
            continue
        groups: dict[int, list[tuple[int, ...]]] = {}
        for group in itertools.chain.from_iterable(itertools.chain.from_iterable(_spread_lanes(module))):
            if len(group) > 1:
                groups.setdefault(module.grid.coordinates(group[0]).pp, []).append(group)
        for stage in range(module.stages):
            for group in groups.get(module.pipeline_rank(stage), []) if module.trains[stage] else ():
                found[StageId(module.name, stage), group] = None
    return tuple(found)


def gather_groups(graph: ModuleGraph) -> tuple[tuple[int, ...], ...]:
    """Return the rank sets that need a group for gathers of parameters alone: each once, in one order.

    Such gathers begin when parameters are there, at any place among all other messages.
    """
    modules = (module for module in graph.modules if "gathers" in module.overlaps)
    found = {group: None for module in modules for pieces, _ in _spread_lanes(module) for group in pieces}
    return tuple(group for group in found if len(group) > 1)


def _spread_lanes(module: Module) -> Iterator[tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]]:
    """Yield what `spread` returns, for all data lanes of a module and those of its experts."""
    for axes in (DATA_AXES, ("edp",))[: 1 + module.experts]:
        for lanes in module.grid.groups(axes):
            yield spread(lanes, module.shard_lanes)


def tied_pairs(grid: Grid) -> tuple[tuple[int, ...], ...]:
    """Return, for each place within a stage, its rank at the first and at the last place along ``pp``."""
    first, last = grid.stage_ranks(0), grid.stage_ranks(grid.pp - 1)
    return tuple((one, other) if one != other else (one,) for one, other in zip(first, last, strict=True))


def spread(lanes: tuple[int, ...], shard_lanes: int) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Return the groups over which copies of a parameter are spread, and those that hold copies of the same piece.

    Args:
        lanes: ranks that differ in their data lane alone.
        shard_lanes: over how many neighbours a copy is to be spread, 0 for all; where it does not divide them, which
            only experts allow, over as many as divide both.
    """
    size = math.gcd(len(lanes), shard_lanes)
    pieces = tuple(lanes[first : first + size] for first in range(0, len(lanes), size))
    return pieces, tuple(zip(*pieces, strict=True))
