"""How large a model may be in each direction: far more than any has, and little enough that its shapes can be counted.

No product of a few of them overflows the 64 bits in which torch counts bytes, and what is done for each layer or head
while a job is only looked at stays a matter of seconds.
"""

from __future__ import annotations

MAX_WIDTH = 1 << 20
"""Of rows, heads and feed-forward parts: columns."""
MAX_LAYERS = 1024
MAX_HEADS = 1 << 14
"""Of attention heads, groups and experts."""
MAX_VOCABULARY = 1 << 24
MAX_ROWS = 1 << 24
"""Of rows of a sample, a table or a window."""
MAX_PIXELS = 1 << 15
"""Of a side of an image or tile."""
MAX_PATCH = 1 << 10
"""Of a side of a patch, in pixels."""
MAX_TILES = 256
"""Of an image."""
MAX_LEARNED_ROWS = 1 << 12
"""Rows that are parameters: class tokens, registers, queries; patches of a side of a table."""
