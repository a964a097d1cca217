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

from mimo.model.attention.batches import pieces_of
from mimo.model.attention.chunks import Chunk, Spans
from mimo.topology.device_copies import to_device


@attrs.frozen(eq=False)
class Piece:
    """Some queries of a call, the keys that they look at, and the mask where the kernel needs one.

    The mask says which query sees which key, one [Q, L] for all chunks, or one for each [C, 1, 1 or Q, L].
    """

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
    keys: Sequence[int],
    *,
    causal: bool,
    window: int,
    device: torch.device,
    items: Sequence[Spans] = (),
) -> Call:
    """Return the call of chunks that `batch` has put together.

    Args:
        chunks: at least one.
        keys: how many rows each looks at.
        causal: whether a row sees only itself and earlier rows of its segment.
        window: of these, how many it sees at most; 0 for all.
        device: where it will run.
        items: of each segment, or none: a row of one sees all of its rows too that the window doesn't end before.
    """
    longest = max(keys)
    if not causal:
        queries, mask = max(chunk.rows for chunk in chunks), None
        if min(keys) < longest:
            mask = torch.arange(longest) < torch.tensor(keys).unsqueeze(1)
            mask = to_device(mask.view(len(chunks), 1, 1, longest), device)
        return Call(len(chunks), queries, longest, (Piece(slice(queries), slice(longest), mask),))
    rows = range(min(chunk.start for chunk in chunks), max(chunk.stop for chunk in chunks))
    inside = [chunk.items(items[chunk.segment]) for chunk in chunks] if items else []
    if any(inside):
        pieces = _pieces(rows, window or longest, device, inside)
    elif 0 < window < longest:
        pieces = _pieces(rows, window, device)
    elif len(rows) == longest:
        pieces = (Piece(slice(longest), slice(longest)),)
    elif _knows_corner_masks(device):
        pieces = (Piece(slice(len(rows)), slice(longest), causal_lower_right(len(rows), longest)),)
    else:
        pieces = _pieces(rows, longest, device)
    return Call(len(chunks), len(rows), longest, pieces, rows.start)


def _knows_corner_masks(device: torch.device) -> bool:
    """Tell whether attention there knows the mask of the last rows without being given one, as flash attention does."""
    return device.type == "cuda"


def _pieces(rows: range, window: int, device: torch.device, inside: Sequence[Spans] = ()) -> tuple[Piece, ...]:
    """Return rows of segments in pieces, each row of which sees at most ``window`` rows back and those of its item.

    ``inside`` names the items of each chunk, or of none.
    """
    count = pieces_of(len(rows), window)
    cuts = [rows.start + len(rows) * piece // count for piece in range(count + 1)]
    pieces = []
    for start, stop in pairwise(cuts):
        first = max(0, start - window + 1)  # row ``start`` sees none before it
        own = [[(low, high) for low, high in spans if low < stop and start < high] for spans in inside]
        last = max([stop, *(high for spans in own for _, high in spans)])
        seen = torch.ones(stop - start, last - first, dtype=torch.bool).tril(start - first)
        if any(own):
            seen = seen.repeat(len(own), 1, 1, 1)
            for chunk, spans in enumerate(own):
                for low, high in spans:
                    item = slice(max(low - start, 0), high - start), slice(max(low - first, 0), high - first)
                    seen[chunk, 0][item] = True
        mask = to_device(seen.triu(start - first - window + 1), device)
        pieces.append(Piece(slice(start - rows.start, stop - rows.start), slice(first, last), mask))
    return tuple(pieces)
