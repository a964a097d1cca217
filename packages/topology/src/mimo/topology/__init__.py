"""Grids over any rank sets, the module graph, and who owns which sample; free of torch."""

from mimo.topology._graph import Actor, Edge, Module, ModuleGraph, RankRole, StageId
from mimo.topology._grid import AXES, Coordinates, Grid
from mimo.topology._ownership import Ownership, count_microbatches

__all__ = [
    "AXES",
    "Actor",
    "Coordinates",
    "Edge",
    "Grid",
    "Module",
    "ModuleGraph",
    "Ownership",
    "RankRole",
    "StageId",
    "count_microbatches",
]
