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

from mimo.model.attention.chunks import Chunk, Spans

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
    """``chunks`` C of ``queries`` Q that look at ``keys`` L each, run at once or piece by piece.

    ``start``: row of their segments at which the queries of all begin; None where those of each chunk are its rows.
    """

    chunks: int
    queries: int
    keys: int
    pieces: tuple[Piece, ...]
    start: int | None = None


def call_of(
    chunks: Sequence[Chunk],
    lengths: Sequence[int],
    *,
    causal: bool,
    window: int,
    device: torch.device,
    items: Sequence[Spans] = (),
) -> Call:
    """Return the call of chunks that `batch` has put together.

    Args:
        chunks: at least one.
        lengths: rows of each segment.
        causal: whether a row sees only itself and earlier rows of its segment.
        window: of these, how many it sees at most; 0 for all.
        device: where it will run.
        items: of each segment, or none: a row of one sees all of its rows too that the window doesn't end before.
    """
    if not causal:
        queries, keys = chunks[0].rows, lengths[chunks[0].segment]
        return Call(len(chunks), queries, keys, (Piece(slice(queries), slice(keys)),))
    start, keys = min(chunk.start for chunk in chunks), max(chunk.stop for chunk in chunks)
    if inside := chunks[0].items(items[chunks[0].segment]) if items else ():
        (chunk,), reach = chunks, min(max(keys, inside[-1][1]), lengths[chunks[0].segment])
        return Call(1, chunk.rows, reach, _pieces(range(start, keys), window or reach, device, inside))
    queries = keys - start
    if 0 < window < keys:
        return Call(len(chunks), queries, keys, _pieces(range(start, keys), window, device), start)
    if queries == keys:
        return Call(len(chunks), queries, keys, (Piece(slice(queries), slice(keys)),), start)
    if _knows_corner_masks(device):
        mask = causal_lower_right(queries, keys)
        return Call(len(chunks), queries, keys, (Piece(slice(queries), slice(keys), mask),), start)
    return Call(len(chunks), queries, keys, _pieces(range(start, keys), keys, device), start)


def _knows_corner_masks(device: torch.device) -> bool:
    """Tell whether attention there knows the mask of the last rows without being given one, as flash attention does."""
    return device.type == "cuda"


def _pieces(rows: range, window: int, device: torch.device, items: Spans = ()) -> tuple[Piece, ...]:
    """Return rows of a segment in pieces, each row of which sees at most ``window`` rows back and those of its item.

    To a kernel a masked pair costs as much as any other. Pieces leave out most of those: they are `_PIECES`, or as many
    to a window.
    """
    count = max(1, len(rows) // max(_PIECE, min(len(rows), window) // _PIECES))
    cuts = [rows.start + len(rows) * piece // count for piece in range(count + 1)]
    pieces = []
    for start, stop in pairwise(cuts):
        first = max(0, start - window + 1)  # row ``start`` sees none before it
        inside = [(low, high) for low, high in items if low < stop and start < high]
        last = max([stop, *(high for _, high in inside)])
        seen = torch.ones(stop - start, last - first, dtype=torch.bool, device=device).tril(start - first)
        for low, high in inside:
            seen[max(low - start, 0) : high - start, max(low - first, 0) : high - first] = True
        mask = seen.triu(start - first - window + 1)
        pieces.append(Piece(slice(start - rows.start, stop - rows.start), slice(first, last), mask))
    return tuple(pieces)
