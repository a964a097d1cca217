"""Routes: which rows of a microbatch go from which rank to which, computed alike at both ends from rows per sample.

Rows of an edge are numbered over the whole microbatch, samples in order. At either end a lane's rows are cut over its
*cells*, the ranks that hold the same rows: a context rank's tensor ranks, or under sequence parallelism each rank by
itself. Every row crosses once to the one target cell that needs it. Where all ranks of that cell hold it already, as
ranks of one source cell, it stays where it is. Of the rest, each rank of the target cell is sent one slice, by itself
if it holds them, otherwise by the ranks of the source cell, each its share.

What a rank computes grows with the lanes that overlap its rows, never with the ranks of the world.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

import attrs

from mimo.schedule.routes.spans import Rows, Span, count, even_shares, merged
from mimo.topology import Grid, Ownership


@attrs.frozen
class Piece:
    """Rows of this end's tensor that go to, or come from, ``peer``, as one message; spans ascend and do not touch."""

    peer: int
    spans: tuple[Span, ...]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return count(self.spans)


@attrs.frozen(kw_only=True)
class Route:
    """What one rank does with one microbatch on one edge, as source, as target, or as both.

    Args:
        held: rows of this rank's tensor as a source.
        sends: pieces of it; the peer may be this rank.
        source_join: for each tensor rank of the source, the rows of that tensor whose gradient it gets for all of them;
            what nobody gets for the others, each gets by itself. Empty where each gets its whole gradient by itself.
        wanted: rows of this rank's tensor as a target.
        receives: pieces of it.
        target_join: for each tensor rank of the target, the rows that it gets for all of them; likewise.
    """

    held: int = 0
    sends: tuple[Piece, ...] = ()
    source_join: tuple[tuple[Span, ...], ...] = ()
    wanted: int = 0
    receives: tuple[Piece, ...] = ()
    target_join: tuple[tuple[Span, ...], ...] = ()


@attrs.frozen
class Cut:
    """A lane's rows cut over its cells: rows ``bounds[i] .. bounds[i + 1]`` lie in ``cells[i]``, in ascending order.

    Cells are numbered within the lane, context rank by context rank, under sequence parallelism tensor rank by tensor
    rank in each. A cell may hold several runs of rows, and a run may be empty.
    """

    bounds: Sequence[int]
    cells: Sequence[int]


@attrs.frozen(kw_only=True)
class End:
    """One end of an edge: where rows lie.

    Args:
        grid: the module's ranks.
        stage: place along ``pp`` of the stage at this end.
        owners: which of its lanes owns which sample of the microbatch.
        sequence_parallel: whether tensor ranks hold slices of rows, not all of them the same rows.
        cut: how the rows of a lane lie in its cells; None where a lane is one cell.
    """

    grid: Grid
    stage: int
    owners: Ownership
    sequence_parallel: bool = False
    cut: Callable[[int], Cut] | None = None


def pipeline_route(grid: Grid, *, rank: int, source: int, target: int, rows: int) -> Route:
    """Return the route between neighbouring stages of one module: each rank to its like, ``rows`` rows.

    Args:
        grid: the module's ranks.
        rank: this rank, at either end; at both where one rank holds both stages.
        source: place along ``pp`` of the stage that sends.
        target: of the stage that receives.
        rows: that the rank's like sends it, or it sends.
    """
    place = grid.coordinates(rank)

    def pieces(pipeline_rank: int) -> tuple[Piece, ...]:
        peer = grid.rank_at(pp=pipeline_rank, dp=place.dp, cp=place.cp, tp=place.tp)
        return (Piece(peer, ((0, rows),)),) if rows else ()

    route = Route()
    if place.pp == source:
        route = attrs.evolve(route, held=rows, sends=pieces(target))
    if place.pp == target:
        route = attrs.evolve(route, wanted=rows, receives=pieces(source))
    return route


def boundary_route(*, rank: int, source: End, target: End, rows: Sequence[int]) -> Route:
    """Return this rank's route between two placements.

    Args:
        rank: this rank, at either end or both.
        source: where rows come from.
        target: where they go.
        rows: rows of each sample of the microbatch.
    """
    starts = (0, *accumulate(rows))
    placement = _EdgeRouting(_Side(source, starts), _Side(target, starts))
    given, taken = placement.give(rank), placement.take(rank)
    return attrs.evolve(given, wanted=taken.wanted, receives=taken.receives, target_join=taken.target_join)


class _Side:
    """One end of the edge with its rows numbered; cells are numbered over the stage."""

    def __init__(self, end: End, starts: Sequence[int]) -> None:
        self._end = end
        self._starts = starts
        grid = end.grid
        self.alike = 1 if end.sequence_parallel else grid.tp
        self._cells = grid.cp * grid.tp // self.alike
        self._first = end.stage * grid.stage_size
        self._cuts: dict[int, Cut] = {}
        self._rows: dict[int, Rows] = {}

    def place(self, rank: int) -> tuple[int, int] | None:
        """Return the cell of a rank and its number in the cell; None where it is not at this end."""
        ranks, stop = self._end.grid.ranks, self._first + self._end.grid.stage_size
        position = bisect_left(ranks, rank, self._first, stop)
        if position == stop or ranks[position] != rank:
            return None
        return divmod(position - self._first, self.alike)

    def ranks(self, cell: int) -> tuple[int, ...]:
        """Return the ranks that hold the rows of a cell."""
        first = self._first + cell * self.alike
        return self._end.grid.ranks[first : first + self.alike]

    def rows(self, cell: int) -> Rows:
        """Return the rows of a cell."""
        if cell not in self._rows:
            lane, own = divmod(cell, self._cells)
            first, cut = self._span(lane).start, self._cut(lane)
            self._rows[cell] = Rows(
                (first + start, first + stop)
                for (start, stop), holder in zip(pairwise(cut.bounds), cut.cells, strict=True)
                if holder == own
            )
        return self._rows[cell]

    def runs(self, spans: Iterable[Span]) -> Iterator[tuple[int, int, int]]:
        """Cut rows where they change cells: start, stop and cell."""
        for start, stop in spans:
            at = start
            while at < stop:
                lane = self._end.owners.lane_of(bisect_right(self._starts, at) - 1)
                rows, cut = self._span(lane), self._cut(lane)
                index, end = bisect_right(cut.bounds, at - rows.start) - 1, min(stop, rows.stop)
                while at < end:
                    after = min(end, rows.start + cut.bounds[index + 1])
                    if at < after:
                        yield at, after, lane * self._cells + cut.cells[index]
                    at, index = after, index + 1

    def _span(self, lane: int) -> range:
        bounds = self._end.owners.bounds
        return range(self._starts[bounds[lane]], self._starts[bounds[lane + 1]])

    def _cut(self, lane: int) -> Cut:
        if lane not in self._cuts:
            rows = len(self._span(lane))
            cut = Cut((0, rows), (0,)) if self._end.cut is None else self._end.cut(lane)
            assert cut.bounds[0] == 0, cut
            assert cut.bounds[-1] == rows, (cut, rows)
            self._cuts[lane] = cut
        return self._cuts[lane]


class _PieceCollector:
    """Rows by peer, in the numbers of a tensor."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._spans: dict[int, list[Span]] = {}

    def add(self, peer: int, start: int, stop: int) -> None:
        """Add neighbouring rows of the edge."""
        if start < stop:
            first = self._rows.offset(start)
            self._spans.setdefault(peer, []).append((first, first + stop - start))

    def add_even(self, rows: Rows, count: int) -> None:
        """Add the even shares of ``rows`` of ``count`` ranks, numbered from 0."""
        for number in range(count):
            for start, stop in rows.share(count, number):
                self.add(number, start, stop)

    @property
    def all(self) -> tuple[Piece, ...]:
        """One piece for each peer."""
        return tuple(Piece(peer, tuple(merged(sorted(spans)))) for peer, spans in self._spans.items())

    def of(self, peers: int) -> tuple[tuple[Span, ...], ...]:
        """Return the spans of peers from 0; none where nobody has any."""
        if not self._spans:
            return ()
        return tuple(tuple(merged(sorted(self._spans.get(peer, ())))) for peer in range(peers))


class _EdgeRouting:
    """Both ends of an edge."""

    def __init__(self, source: _Side, target: _Side) -> None:
        self._source = source
        self._target = target
        self._moved: dict[int, Rows] = {}

    def give(self, rank: int) -> Route:
        """Return what ``rank`` does as a source."""
        place = self._source.place(rank)
        if place is None:
            return Route()
        cell, number = place
        ranks, held = self._source.ranks(cell), self._source.rows(cell)
        sends, brought = _PieceCollector(held), _PieceCollector(held)
        # Only where ranks of this cell are targets too can one of them give other rows than its even share, and then
        # all must know who gives what, to put the gradients together.
        mixed = len(ranks) > 1 and any(self._target.place(one) is not None for one in ranks)
        if len(ranks) > 1 and not mixed:
            brought.add_even(held, len(ranks))
        for giver, peer, (start, stop), (low, high) in self._gifts(
            cell, held.spans if mixed else held.share(len(ranks), number)
        ):
            if giver == rank:
                sends.add(peer, start, stop)
            if mixed:
                brought.add(ranks.index(giver), low, high)
        return Route(held=len(held), sends=sends.all, source_join=brought.of(len(ranks)))

    def take(self, rank: int) -> Route:
        """Return what ``rank`` does as a target."""
        place = self._target.place(rank)
        if place is None:
            return Route()
        cell, number = place
        ranks, wanted = self._target.ranks(cell), self._target.rows(cell)
        receives, brought = _PieceCollector(wanted), _PieceCollector(wanted)
        kept = self._stay(ranks)
        if kept is not None:
            for start, stop, giver in self._source.runs(wanted.spans):
                if giver == kept:
                    receives.add(rank, start, stop)
        moved = self._moves(cell, ranks)
        if len(ranks) > 1:
            brought.add_even(moved, len(ranks))
        for start, stop, giver in self._source.runs(moved.share(len(ranks), number)):
            givers = self._source.ranks(giver)
            if rank in givers:
                receives.add(rank, start, stop)
            elif len(givers) == 1:
                receives.add(givers[0], start, stop)
            else:
                for one, low, high in self._source.rows(giver).shares(start, stop, len(givers)):
                    receives.add(givers[one], low, high)
        return Route(wanted=len(wanted), receives=receives.all, target_join=brought.of(len(ranks)))

    def _gifts(self, cell: int, spans: Iterable[Span]) -> Iterator[tuple[int, int, Span, Span]]:
        """Tell who gives what to whom of a source cell's rows.

        Yields:
            Giver, taker, the rows, and those of them whose gradient the giver gets for the whole cell.
        """
        ranks = self._source.ranks(cell)
        for start, stop, taker in self._target.runs(spans):
            takers = self._target.ranks(taker)
            if self._stay(takers) == cell:
                alone = len(takers) < len(ranks)
                brought = even_shares(start, stop, len(takers)) if alone else [(start, start)] * len(takers)
                for rank, own in zip(takers, brought, strict=True):
                    yield rank, rank, (start, stop), own
                continue
            for peer, low, high in self._slices(taker, takers, start, stop):
                if peer in ranks or len(ranks) == 1:
                    yield (peer if peer in ranks else ranks[0]), peer, (low, high), (low, high)
                    continue
                for giver, first, last in self._source.rows(cell).shares(low, high, len(ranks)):
                    yield ranks[giver], peer, (first, last), (first, last)

    def _stay(self, takers: Sequence[int]) -> int | None:
        """Return the source cell that has all ranks of a target cell, if one has: what it holds, they hold."""
        first = self._source.place(takers[0])
        if first is None:
            return None
        ranks = self._source.ranks(first[0])
        return first[0] if all(rank in ranks for rank in takers) else None

    def _moves(self, taker: int, takers: Sequence[int]) -> Rows:
        """Return the rows of a target cell that do not stay where they are."""
        if taker not in self._moved:
            rows, kept = self._target.rows(taker), self._stay(takers)
            if kept is not None:
                runs = self._source.runs(rows.spans)
                rows = Rows((start, stop) for start, stop, giver in runs if giver != kept)
            self._moved[taker] = rows
        return self._moved[taker]

    def _slices(self, taker: int, takers: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Cut neighbouring rows that move to a target cell over its ranks: rank, start and stop."""
        if len(takers) == 1:
            yield takers[0], start, stop
            return
        for one, low, high in self._moves(taker, takers).shares(start, stop, len(takers)):
            yield takers[one], low, high
