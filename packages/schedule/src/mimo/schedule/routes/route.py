"""Routes: which rows of a microbatch go from which rank to which, computed the same at both ends from rows per sample.

Rows of an edge are numbered over the whole microbatch, samples in order and in a sample its items. At either end a lane
owns some of these, neighbours or not, and its tensor has their rows in ascending order. They are divided over
its *cells*, the ranks that hold the same rows: a context rank's tensor ranks, or under sequence parallelism each single
rank. Every row goes once to the one target cell that needs it. It stays in place if all ranks of that cell hold it
already, as ranks of one source cell. Of the rest, each rank of the target cell receives one slice: from itself if it
holds those rows, otherwise from the ranks of the source cell, each of which sends its share.

The work of a rank grows with the lanes that overlap its rows, not with the ranks of the world.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

import attrs

from mimo.schedule.routes.spans import Rows, Span, count, even_shares, merged
from mimo.topology import Grid, Ownership


@attrs.frozen
class RoutePiece:
    """Rows of this rank's tensor that go to, or come from, ``peer`` as one message; spans ascend and do not touch."""

    peer: int
    spans: tuple[Span, ...]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return count(self.spans)


@attrs.frozen(kw_only=True)
class Route:
    """What one rank sends and receives of one microbatch on one edge, as source, as target, or as both.

    Args:
        held: rows of this rank's tensor as a source.
        sends: pieces of it; the peer may be this rank.
        source_join: for each tensor rank of the source, the rows whose gradient it receives for all of them; rows in no
            entry are received by each rank itself. Empty where each rank receives the whole gradient itself.
        wanted: rows of this rank's tensor as a target.
        receives: pieces of it.
        target_join: for each tensor rank of the target, likewise the rows that it receives for all of them.
    """

    held: int = 0
    sends: tuple[RoutePiece, ...] = ()
    source_join: tuple[tuple[Span, ...], ...] = ()
    wanted: int = 0
    receives: tuple[RoutePiece, ...] = ()
    target_join: tuple[tuple[Span, ...], ...] = ()


@attrs.frozen
class Cut:
    """Rows of a lane divided over its cells: ``bounds[i] .. bounds[i + 1]`` lie in ``cells[i]``, in ascending order.

    Cells are numbered within the lane, context rank by context rank, under sequence parallelism tensor rank by tensor
    rank in each. A cell may hold several runs of rows; a run may be empty.
    """

    bounds: Sequence[int]
    cells: Sequence[int]


@attrs.frozen(kw_only=True)
class End:
    """One end of an edge: where rows lie.

    Args:
        grid: the module's ranks.
        stage: place along ``pp`` of the stage at this end.
        owners: which lane owns which of the samples or items that ``rows`` of `boundary_route` counts; a lane's
            tensor has the rows of what it owns in ascending order.
        sequence_parallel: whether tensor ranks hold slices of rows, not all of them the same rows.
        cut: how the rows of a lane are divided over its cells; None where a lane is one cell.
    """

    grid: Grid
    stage: int
    owners: Ownership
    sequence_parallel: bool = False
    cut: Callable[[int], Cut] | None = None


def pipeline_route(grid: Grid, *, rank: int, source: int, target: int, rows: int) -> Route:
    """Return the route between neighbouring stages of one module: each rank to its counterpart, ``rows`` rows.

    Args:
        grid: the module's ranks.
        rank: this rank, at either end; at both where one rank holds both stages.
        source: place along ``pp`` of the stage that sends.
        target: of the stage that receives.
        rows: that the rank sends or receives.
    """
    place = grid.coordinates(rank)

    def pieces(pipeline_rank: int) -> tuple[RoutePiece, ...]:
        peer = grid.rank_at(pp=pipeline_rank, dp=place.dp, cp=place.cp, tp=place.tp)
        return (RoutePiece(peer, ((0, rows),)),) if rows else ()

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
        rows: rows of each sample or item of the microbatch, in the order in which both ends own them.
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
        self.cell_size = 1 if end.sequence_parallel else grid.tp
        self._cells = grid.cp * grid.tp // self.cell_size
        self._first = end.stage * grid.stage_size
        self._cuts: dict[int, Cut] = {}
        self._rows: dict[int, Rows] = {}
        self._lanes: dict[int, Rows] = {}

    def place(self, rank: int) -> tuple[int, int] | None:
        """Return the cell of a rank and its number in the cell; None where it is not at this end."""
        ranks, stop = self._end.grid.ranks, self._first + self._end.grid.stage_size
        position = bisect_left(ranks, rank, self._first, stop)
        if position == stop or ranks[position] != rank:
            return None
        return divmod(position - self._first, self.cell_size)

    def ranks(self, cell: int) -> tuple[int, ...]:
        """Return the ranks that hold the rows of a cell."""
        first = self._first + cell * self.cell_size
        return self._end.grid.ranks[first : first + self.cell_size]

    def rows(self, cell: int) -> Rows:
        """Return the rows of a cell."""
        if cell not in self._rows:
            lane, own = divmod(cell, self._cells)
            rows, cut = self._lane(lane), self._cut(lane)
            self._rows[cell] = Rows(
                span
                for (start, stop), holder in zip(pairwise(cut.bounds), cut.cells, strict=True)
                if holder == own
                for span in rows.slice(start, stop)
            )
        return self._rows[cell]

    def runs(self, spans: Iterable[Span]) -> Iterator[tuple[int, int, int]]:
        """Split rows where the cell changes: start, stop and cell."""
        for start, stop in spans:
            row = start
            while row < stop:
                lane = self._end.owners.lane_of(bisect_right(self._starts, row) - 1)
                cut, (offset, run_stop) = self._cut(lane), self._lane(lane).run(row)
                index, end = bisect_right(cut.bounds, offset) - 1, min(stop, run_stop)
                first = row - offset
                while row < end:
                    after = min(end, first + cut.bounds[index + 1])
                    if row < after:
                        yield row, after, lane * self._cells + cut.cells[index]
                    row, index = after, index + 1

    def _lane(self, lane: int) -> Rows:
        """Return the rows of a lane."""
        if lane not in self._lanes:
            owners, starts = self._end.owners, self._starts
            if owners.order is None:
                spans = [(starts[owners.bounds[lane]], starts[owners.bounds[lane + 1]])]
            else:
                spans = [(starts[position], starts[position + 1]) for position in owners.span(lane)]
            self._lanes[lane] = Rows(spans)
        return self._lanes[lane]

    def _cut(self, lane: int) -> Cut:
        if lane not in self._cuts:
            rows = len(self._lane(lane))
            cut = Cut((0, rows), (0,)) if self._end.cut is None else self._end.cut(lane)
            assert cut.bounds[0] == 0, cut
            assert cut.bounds[-1] == rows, (cut, rows)
            self._cuts[lane] = cut
        return self._cuts[lane]


class _PieceCollector:
    """Collects rows by peer, numbered as in a tensor."""

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
    def all(self) -> tuple[RoutePiece, ...]:
        """One piece for each peer."""
        return tuple(RoutePiece(peer, tuple(merged(sorted(spans)))) for peer, spans in self._spans.items())

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
        # If ranks of this cell are targets too, one may give other rows than its even share. Then all must know who
        # gives what, to join the gradients.
        mixed = len(ranks) > 1 and any(self._target.place(member) is not None for member in ranks)
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
        staying = self._stay(ranks)
        if staying is not None:
            for start, stop, giver in self._source.runs(wanted.spans):
                if giver == staying:
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
                for share, low, high in self._source.rows(giver).shares(start, stop, len(givers)):
                    receives.add(givers[share], low, high)
        return Route(wanted=len(wanted), receives=receives.all, target_join=brought.of(len(ranks)))

    def _gifts(self, cell: int, spans: Iterable[Span]) -> Iterator[tuple[int, int, Span, Span]]:
        """Yield who gives which rows of a source cell to whom.

        Yields:
            Giver, taker, the rows, and those whose gradient the giver receives for the whole cell.
        """
        ranks = self._source.ranks(cell)
        for start, stop, taker in self._target.runs(spans):
            takers = self._target.ranks(taker)
            if self._stay(takers) == cell:
                is_part = len(takers) < len(ranks)
                brought = even_shares(start, stop, len(takers)) if is_part else [(start, start)] * len(takers)
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
        """Return the source cell that has all ranks of a target cell, if there is one: its rows need not move."""
        first = self._source.place(takers[0])
        if first is None:
            return None
        ranks = self._source.ranks(first[0])
        return first[0] if all(rank in ranks for rank in takers) else None

    def _moves(self, taker: int, takers: Sequence[int]) -> Rows:
        """Return the rows of a target cell that do not stay where they are."""
        if taker not in self._moved:
            rows, staying = self._target.rows(taker), self._stay(takers)
            if staying is not None:
                runs = self._source.runs(rows.spans)
                rows = Rows((start, stop) for start, stop, giver in runs if giver != staying)
            self._moved[taker] = rows
        return self._moved[taker]

    def _slices(self, taker: int, takers: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Divide neighbouring rows that move to a target cell over its ranks: rank, start and stop."""
        if len(takers) == 1:
            yield takers[0], start, stop
            return
        for share, low, high in self._moves(taker, takers).shares(start, stop, len(takers)):
            yield takers[share], low, high
