"""How matrices are cut over mesh axes, and which rank works on which: plain numbers, equal on all ranks."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import TypeAlias

import attrs

Shape: TypeAlias = tuple[int, int]


@attrs.frozen
class Matrix:
    """A matrix that is cut over mesh axes.

    Args:
        shape: of the whole.
        dims: for each axis, outermost first, the dim along which it cuts what the axes before it leave.
        owner: for each axis, the index along it of the one rank that works on the matrix.
    """

    shape: Shape
    dims: tuple[int, ...]
    owner: tuple[int, ...]


def piece_length(length: int, pieces: int, index: int) -> int:
    """Return how much of ``length`` piece ``index`` has, as `torch.chunk` cuts; those beyond the end have nothing."""
    each = -(-length // pieces)
    return max(0, min(each, length - index * each))


def piece_shape(shape: Shape, dims: Sequence[int], sizes: Sequence[int], place: Sequence[int]) -> Shape:
    """Return the shape of the piece at ``place``.

    Args:
        shape: of the whole.
        dims: for each axis, outermost first, which dim it cuts.
        sizes: ranks along each axis.
        place: index along each axis.
    """
    lengths = list(shape)
    for dim, size, index in zip(dims, sizes, place, strict=True):
        lengths[dim] = piece_length(lengths[dim], size, index)
    return lengths[0], lengths[1]


def newton_schulz_work(shape: Shape) -> int:
    """Return the multiplications of one Newton-Schulz iteration, which works on the Gram matrix of the short side."""
    short, long = sorted(shape)
    return short * short * (2 * long + short)


def share_out(shapes: Sequence[Shape], sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the owner of each matrix, as indices along axes of ``sizes``: the largest first, each to who has least.

    The busiest rank then has at most a third more than in the best of all ways (Graham 1969, on timing anomalies).
    """
    ranks = [(0, rank) for rank in range(math.prod(sizes))]
    owners: dict[int, int] = {}
    for at in sorted(range(len(shapes)), key=lambda at: (-newton_schulz_work(shapes[at]), at)):
        work, rank = ranks[0]
        heapq.heapreplace(ranks, (work + newton_schulz_work(shapes[at]), rank))
        owners[at] = rank
    return [_indices(owners[at], sizes) for at in range(len(shapes))]


def _indices(rank: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the indices along axes of ``sizes``, the last one fastest."""
    return tuple(rank // math.prod(sizes[axis + 1 :]) % size for axis, size in enumerate(sizes))
