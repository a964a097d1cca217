"""Attention over packed segments."""

from mimo.model.attention.cache_step import CacheStep, SequenceRun, grown, moves
from mimo.model.attention.chunks import Spans, cut_segments
from mimo.model.attention.operator import attend
from mimo.model.attention.segments import CarriedSegments, Segments

__all__ = [
    "CacheStep",
    "CarriedSegments",
    "Segments",
    "SequenceRun",
    "Spans",
    "attend",
    "cut_segments",
    "grown",
    "moves",
]
