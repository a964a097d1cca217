"""Attention over packed segments."""

from mimo.model.attention.attention import attend
from mimo.model.attention.chunks import cut_segments
from mimo.model.attention.segments import Segments

__all__ = [
    "Segments",
    "attend",
    "cut_segments",
]
