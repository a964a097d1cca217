"""Attention over packed segments."""

from mimo.model.attention.attention import attend
from mimo.model.attention.cache_step import CacheStep, SequenceRun, grown, moves
from mimo.model.attention.chunks import Spans, cut_segments
from mimo.model.attention.segments import Segments

__all__ = [
    "CacheStep",
    "Segments",
    "SequenceRun",
    "Spans",
    "attend",
    "cut_segments",
    "grown",
    "moves",
]
