"""The groups of ranks that a graph of modules needs: what each is for, each distinct one once, in one global order."""

from __future__ import annotations

from mimo.topology._graph import ModuleGraph
from mimo.topology._grid import Grid

DATA_AXES = ("dp", "cp")
"""Axes along which every parameter is replicated while the work is not."""
ROW_AXES = ("cp", "tp")
"""Axes over which the rows of one lane may be split."""


def needed_groups(graph: ModuleGraph) -> tuple[tuple[int, ...], ...]:
    """Return the rank sets, of two ranks or more, that a graph needs a group for: each once, in one order.

    Those are, for each grid, its tensor groups, its context groups, its data groups, data and tensor ranks together
    (gradients of which a tensor rank computes only a part), for a tied module the pairs of first and last stage, and
    for one with experts the ranks that share the rows of a lane, and the groups of the expert view.
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
    return tuple(group for group in found if len(group) > 1)


def tied_pairs(grid: Grid) -> tuple[tuple[int, ...], ...]:
    """Return, for each place within a stage, its rank at the first and at the last place along ``pp``."""
    first, last = grid.stage_ranks(0), grid.stage_ranks(grid.pp - 1)
    return tuple((one, other) if one != other else (one,) for one, other in zip(first, last, strict=True))
