"""Grids over any rank sets, the module graph, and who owns which sample; free of torch."""

from mimo.topology._context import context_spans
from mimo.topology._graph import (
    Actor,
    Edge,
    Feeds,
    Module,
    ModuleGraph,
    Overlap,
    Placement,
    RankRole,
    Recompute,
    StageId,
)
from mimo.topology._grid import AXES, EXPERT_AXES, Coordinates, ExpertCoordinates, Grid
from mimo.topology._groups import (
    DATA,
    DATA_AXES,
    REPLICA,
    ROW_AXES,
    gather_groups,
    gradient_groups,
    needed_groups,
    tied_pairs,
)
from mimo.topology._ownership import Ownership, count_microbatches
from mimo.topology._ranks import MAX_RANKS, Ranks, parse_ranks, show_ranks

__all__ = [
    "AXES",
    "DATA",
    "DATA_AXES",
    "EXPERT_AXES",
    "MAX_RANKS",
    "REPLICA",
    "ROW_AXES",
    "Actor",
    "Coordinates",
    "Edge",
    "ExpertCoordinates",
    "Feeds",
    "Grid",
    "Module",
    "ModuleGraph",
    "Overlap",
    "Ownership",
    "Placement",
    "RankRole",
    "Ranks",
    "Recompute",
    "StageId",
    "context_spans",
    "count_microbatches",
    "gather_groups",
    "gradient_groups",
    "needed_groups",
    "parse_ranks",
    "show_ranks",
    "tied_pairs",
]
