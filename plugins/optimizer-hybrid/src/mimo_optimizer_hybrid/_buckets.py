"""Which parameters are held by the host, and in which pieces their gradients travel: pure functions over sizes."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

_FEWEST_BUCKETS = 32
"""Of parameters of like size, so that a fraction is met within a few per cent."""
_ALIGNED = 16
"""Numbers: a parameter is cut only where the vector loops of a kernel would stop anyway."""


@attrs.frozen
class Span:
    """Numbers ``start`` to ``stop`` of a parameter, which lie at ``at`` of a staging buffer."""

    parameter: int
    start: int
    stop: int
    at: int


@attrs.frozen
class Piece:
    """What travels and is stepped at once: spans of parameters of one bucket."""

    bucket: int
    spans: tuple[Span, ...]


def bucket_numbers(total: int, bucket_bytes: int) -> int:
    """Return how many fp32 numbers a bucket and a staging buffer hold, of ``total``."""
    most = min(bucket_bytes // 4, -(-total // _FEWEST_BUCKETS))
    return max(-(-most // _ALIGNED), 1) * _ALIGNED


def cut_buckets(sizes: Sequence[int], most: int) -> list[range]:
    """Put whole parameters into buckets, in their order.

    Args:
        sizes: numbers of each parameter.
        most: elements of a bucket; a parameter with more is one by itself.

    Returns:
        The parameters of each bucket, by their index.
    """
    buckets: list[range] = []
    begin, held = 0, 0
    for index, size in enumerate(sizes):
        if index > begin and held + size > most:
            buckets.append(range(begin, index))
            begin, held = index, 0
        held += size
    return [*buckets, range(begin, len(sizes))] if sizes else []


def first_of_host(shares: Sequence[float], fraction: float, *, kept: int = 0) -> int:
    """Return from which parameter on the host holds all: the last ones, whose layers need them last.

    Of all ways to cut between two parameters it is the one that comes nearest to ``fraction``.

    Args:
        shares: how much of a rank's numbers each parameter is.
        fraction: of all that the host is to hold.
        kept: of the first parameters, those that it holds only if it holds all by ``fraction`` = 1.
    """
    if fraction == 1:
        return 0
    wanted = fraction * sum(shares)
    best, least, held = len(shares), wanted, 0.0
    for index in reversed(range(kept, len(shares))):
        held += shares[index]
        if abs(held - wanted) < least:
            best, least = index, abs(held - wanted)
    return best


def cut_pieces(sizes: Sequence[int], buckets: Sequence[range], most: int) -> list[Piece]:
    """Cut buckets into pieces of at most ``most`` numbers, in order; nearly every bucket is one piece."""
    pieces: list[Piece] = []
    for number, bucket in enumerate(buckets):
        spans: list[Span] = []
        used = 0
        for parameter in bucket:
            start = 0
            while start < sizes[parameter]:
                stop = min(sizes[parameter], start + most - used)
                spans.append(Span(parameter, start, stop, used))
                used += stop - start
                start = stop
                if used == most:
                    pieces.append(Piece(number, tuple(spans)))
                    spans, used = [], 0
        if spans:
            pieces.append(Piece(number, tuple(spans)))
    return pieces
