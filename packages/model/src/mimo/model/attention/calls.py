"""What one kernel call of attention computes: chunks of as many queries, which look at as many keys, and the masks.

Shapes: C chunks of Q queries, which look at L keys each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import attrs
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from mimo.model.attention.chunks import Chunk

_PIECES = 4  # of a masked call at most: over two ranks one computes a quarter more than is looked at, four a sixteenth
_PIECE = 128  # queries of each at least, for the kernel to be quick


@attrs.frozen(eq=False)
class Piece:
    """Some queries of a call, the keys that they look at, and the mask where the kernel needs one."""

    queries: slice
    keys: slice
    mask: Tensor | None = None


@attrs.frozen(eq=False)
class Call:
    """``chunks`` C of ``queries`` Q that look at ``keys`` L each, run at once or piece by piece."""

    chunks: int
    queries: int
    keys: int
    pieces: tuple[Piece, ...]


def call_of(
    chunks: Sequence[Chunk], lengths: Sequence[int], *, causal: bool, window: int, device: torch.device
) -> Call:
    """Return the call of chunks that `batch` has put together.

    Args:
        chunks: at least one.
        lengths: rows of each segment.
        causal: whether a row sees only itself and earlier rows of its segment.
        window: of these, how many it sees at most; 0 for all.
        device: where it will run.
    """
    if not causal:
        queries, keys = chunks[0].rows, lengths[chunks[0].segment]
        return Call(len(chunks), queries, keys, (Piece(slice(queries), slice(keys)),))
    keys = max(chunk.stop for chunk in chunks)
    queries = keys - min(chunk.start for chunk in chunks)
    if 0 < window < keys:
        return Call(len(chunks), queries, keys, _pieces(queries, keys, window, device))
    if queries == keys:
        return Call(len(chunks), queries, keys, (Piece(slice(queries), slice(keys)),))
    if _knows_corner_masks(device):
        mask = causal_lower_right(queries, keys)
        return Call(len(chunks), queries, keys, (Piece(slice(queries), slice(keys), mask),))
    return Call(len(chunks), queries, keys, _pieces(queries, keys, keys, device))


def _knows_corner_masks(device: torch.device) -> bool:
    """Tell whether attention there knows the mask of the last rows without being given one, as flash attention does."""
    return device.type == "cuda"


def _pieces(queries: int, keys: int, window: int, device: torch.device) -> tuple[Piece, ...]:
    """Return the last ``queries`` of ``keys`` rows in pieces, each of which sees at most ``window`` rows back.

    To a kernel a masked pair costs as much as any other. Pieces leave out most of those: they are `_PIECES`, or as many
    to a window.
    """
    count = max(1, queries // max(_PIECE, min(queries, window) // _PIECES))
    cuts = [keys - queries + queries * piece // count for piece in range(count + 1)]
    pieces = []
    for start, stop in pairwise(cuts):
        first = max(0, start - window + 1)  # row ``start`` sees none before it
        seen = torch.ones(stop - start, stop - first, dtype=torch.bool, device=device)
        mask = seen.tril(start - first).triu(start - first - window + 1)
        pieces.append(Piece(slice(start - keys + queries, stop - keys + queries), slice(first, stop), mask))
    return tuple(pieces)
