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
        most: numbers of a bucket; a parameter with more is one by itself.

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


def first_host_bucket(sizes: Sequence[int], buckets: Sequence[range], fraction: float) -> int:
    """Return from which bucket on the host holds all: the last ones, whose layers need them last.

    Of all ways to cut between two buckets it is the one that comes nearest to ``fraction`` of all numbers.
    """
    if fraction == 1:
        return 0
    wanted = fraction * sum(sizes)
    best, least, held = len(buckets), wanted, 0
    for index in reversed(range(len(buckets))):
        held += sum(sizes[one] for one in buckets[index])
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
