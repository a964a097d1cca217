"""Routes: which rows of a microbatch go from which rank to which, computed alike at both ends from rows per sample.

Rows of an edge are numbered over the whole microbatch, samples in order. A source lane holds the rows of its samples,
all of them on each tensor rank, and its tensor ranks share the sending. Each target tensor rank is sent one slice of
its lane's rows. What a rank sends to a peer is the overlap of its share with the peer's slice, so every row crosses
once to each target tensor group, whatever the lane counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import attrs

from mimo.topology import Coordinates, Grid, Ownership


@attrs.frozen
class Piece:
    """Rows ``start .. stop`` of this end's tensor that go to, or come from, ``peer``."""

    peer: int
    start: int
    stop: int


@attrs.frozen(kw_only=True)
class Route:
    """What one rank does with one microbatch on one edge, as source, as target, or as both.

    Args:
        held: rows of this rank's tensor as a source.
        sends: pieces of it, each row to each target once; the peer may be this rank.
        source_slices: rows that each tensor rank of the source lane sends, where their gradients must be put
            together again; empty where each rank gets its whole gradient by itself.
        wanted: rows that arrive at this rank as a target.
        receives: pieces of them.
        target_slices: rows that arrive at each tensor rank of the target lane, where they must be put together;
            empty where a rank needs no more than what arrives.
    """

    held: int = 0
    sends: tuple[Piece, ...] = ()
    source_slices: tuple[int, ...] = ()
    wanted: int = 0
    receives: tuple[Piece, ...] = ()
    target_slices: tuple[int, ...] = ()


@attrs.frozen
class _Share:
    """A rank's contiguous share of the microbatch's rows, and where its tensor begins in them."""

    rank: int
    start: int
    stop: int
    base: int


def pipeline_route(grid: Grid, *, rank: int, stage: int, rows: int) -> Route:
    """Return the route between ``stage`` and the next of one module: each rank to its like, ``rows`` rows."""
    place = grid.coordinates(rank)
    peer = _like(grid, place, stage + 1 if place.pp == stage else stage)
    pieces = (Piece(peer, 0, rows),) if rows else ()
    return Route(held=rows, sends=pieces) if place.pp == stage else Route(wanted=rows, receives=pieces)


def boundary_route(
    *,
    rank: int,
    source: Grid,
    target: Grid,
    source_owners: Ownership,
    target_owners: Ownership,
    rows: Sequence[int],
    cuts: Callable[[int], Sequence[int]] | None = None,
) -> Route:
    """Return this rank's route from the last stage of ``source`` to stage 0 of ``target``.

    Args:
        rank: this rank, in either grid or both.
        source: the grid that rows come from.
        target: the grid that they go to.
        source_owners: which of the source's lanes owns which sample.
        target_owners: the same of the target.
        rows: rows of each sample of the microbatch.
        cuts: for a target under sequence parallelism, the row numbers within a lane at which its tensor ranks'
            slices begin and end (``tp + 1`` of them); None where every tensor rank needs all rows of its lane.
    """
    starts = (0, *accumulate(rows))
    if cuts is None and _stay_in_place(source, target) and source_owners == target_owners:
        lane = source.coordinates(rank).dp
        held = _lane_rows(starts, source_owners, lane)
        return Route(
            held=len(held),
            sends=(Piece(rank, 0, len(held)),),
            wanted=len(held),
            receives=(Piece(rank, 0, len(held)),),
        )
    route = Route()
    if rank in source.stage_ranks(source.pp - 1):
        place = source.coordinates(rank)
        held = _lane_rows(starts, source_owners, place.dp)
        slices = _even(held, source.tp)
        mine = _Share(rank, *slices[place.tp], held.start)
        shares = _target_shares(starts, target, target_owners, cuts)
        route = attrs.evolve(
            route,
            held=len(held),
            sends=_overlaps(mine, shares),
            source_slices=tuple(stop - start for start, stop in slices) if source.tp > 1 else (),
        )
    if rank in target.stage_ranks(0):
        place = target.coordinates(rank)
        wanted = _lane_rows(starts, target_owners, place.dp)
        slices = _slices(wanted, target, place.dp, cuts)
        start, stop = slices[place.tp]
        mine = _Share(rank, start, stop, start)
        route = attrs.evolve(
            route,
            wanted=stop - start,
            receives=_overlaps(mine, _source_shares(starts, source, source_owners)),
            target_slices=tuple(stop - start for start, stop in slices) if target.tp > 1 and cuts is None else (),
        )
    return route


def _like(grid: Grid, place: Coordinates, stage: int) -> int:
    return grid.rank_at(pp=stage, dp=place.dp, cp=place.cp, tp=place.tp)


def _stay_in_place(source: Grid, target: Grid) -> bool:
    """Tell whether each lane of both ends lies on the same tensor ranks, so that no row has to move."""
    return source.stage_ranks(source.pp - 1) == target.stage_ranks(0) and (source.dp, source.cp, source.tp) == (
        target.dp,
        target.cp,
        target.tp,
    )


def _lane_rows(starts: Sequence[int], owners: Ownership, lane: int) -> range:
    return range(starts[owners.bounds[lane]], starts[owners.bounds[lane + 1]])


def _even(rows: range, count: int) -> list[tuple[int, int]]:
    bounds = Ownership.even(len(rows), count).bounds
    return [(rows.start + bounds[index], rows.start + bounds[index + 1]) for index in range(count)]


def _slices(rows: range, target: Grid, lane: int, cuts: Callable[[int], Sequence[int]] | None) -> list[tuple[int, int]]:
    if cuts is None:
        return _even(rows, target.tp)
    bounds = cuts(lane)
    return [(rows.start + bounds[index], rows.start + bounds[index + 1]) for index in range(target.tp)]


def _source_shares(starts: Sequence[int], source: Grid, owners: Ownership) -> list[_Share]:
    return [
        _Share(source.rank_at(pp=source.pp - 1, dp=lane, tp=tensor), start, stop, 0)
        for lane in range(source.dp)
        for tensor, (start, stop) in enumerate(_even(_lane_rows(starts, owners, lane), source.tp))
    ]


def _target_shares(
    starts: Sequence[int], target: Grid, owners: Ownership, cuts: Callable[[int], Sequence[int]] | None
) -> list[_Share]:
    return [
        _Share(target.rank_at(dp=lane, tp=tensor), start, stop, 0)
        for lane in range(target.dp)
        for tensor, (start, stop) in enumerate(_slices(_lane_rows(starts, owners, lane), target, lane, cuts))
    ]


def _overlaps(mine: _Share, others: Sequence[_Share]) -> tuple[Piece, ...]:
    """Return the non-empty overlaps of ``mine`` with each of ``others``, in my tensor's own row numbers."""
    pieces = (
        Piece(other.rank, max(mine.start, other.start) - mine.base, min(mine.stop, other.stop) - mine.base)
        for other in others
    )
    return tuple(piece for piece in pieces if piece.start < piece.stop)
