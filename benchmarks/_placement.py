"""Placements between which rows are moved, and how few must move, found the plain way."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import attrs

from mimo.schedule import Cut, End
from mimo.topology import Grid, Ownership, context_spans


@attrs.frozen(kw_only=True)
class Placement:
    """A source and a target; rows lie in context ranks as samples are cut over them, in tensor ranks by slices."""

    source: Grid
    target: Grid
    sliced: tuple[bool, bool] = (False, False)

    def ends(self, rows: Sequence[int]) -> tuple[End, End]:
        """Return both ends for a microbatch with so many rows a sample."""
        return _end(self.source, rows, sliced=self.sliced[0]), _end(self.target, rows, sliced=self.sliced[1])

    def held_by(self, rank: int, rows: Sequence[int]) -> list[int]:
        """Return the numbers of the rows that a rank holds as a source."""
        return [row for row, ranks in enumerate(_holders(self.ends(rows)[0])) if rank in ranks]

    def fewest(self, rows: Sequence[int]) -> int:
        """Return how many rows must cross: each to the ranks that share it, unless all of those hold it already."""
        held, wanted = (_holders(end) for end in self.ends(rows))
        return sum(not needs <= has for has, needs in zip(held, wanted, strict=True))


def _end(grid: Grid, rows: Sequence[int], *, sliced: bool) -> End:
    owners = Ownership.even(len(rows), grid.dp)

    def cut(lane: int) -> Cut:
        samples = [rows[position] for position in owners.span(lane)]
        pieces = sorted(
            (first + start, first + stop, rank)
            for first, length in zip(accumulate([0, *samples]), samples, strict=False)
            for rank in range(grid.cp)
            for start, stop in context_spans(length, size=grid.cp, rank=rank)
        )
        if not sliced:
            return Cut((0, *(stop for _, stop, _ in pieces)), [rank for *_, rank in pieces])
        each = [-(-sum(b - a for a, b, rank in pieces if rank == own) // grid.tp) for own in range(grid.cp)]
        bounds, cells, filled = [0], [], [0] * grid.cp
        for start, stop, rank in pieces:
            while bounds[-1] < stop:
                number = filled[rank] // each[rank]
                size = min(stop - bounds[-1], (number + 1) * each[rank] - filled[rank])
                filled[rank] += size
                bounds.append(bounds[-1] + size)
                cells.append(rank * grid.tp + number)
            assert start <= bounds[-1]
        return Cut(bounds, cells)

    stage = grid.pp - 1
    return End(grid=grid, stage=stage, owners=owners, sequence_parallel=sliced, cut=cut)


def _holders(end: End) -> list[set[int]]:
    """Return the ranks that hold each row, found the plain way."""
    ranks, copies = end.grid.stage_ranks(end.stage), 1 if end.sequence_parallel else end.grid.tp
    found: list[set[int]] = []
    assert end.cut is not None
    for lane in range(end.grid.dp):
        cut = end.cut(lane)
        for (start, stop), cell in zip(pairwise(cut.bounds), cut.cells, strict=True):
            first = (lane * len(ranks) // end.grid.dp) + cell * copies
            found += [set(ranks[first : first + copies])] * (stop - start)
    return found


def _grid(ranks: range, **sizes: int) -> Grid:
    return Grid(name="module", ranks=ranks, **sizes)


TIMED = Placement(source=_grid(range(4), dp=2, tp=2), target=_grid(range(4, 8), tp=4), sliced=(False, True))
PLACEMENTS = {
    "dp 2 tp 2 to tp 4 sp": TIMED,
    "dp 2 tp 2 to tp 4": Placement(source=_grid(range(4), dp=2, tp=2), target=_grid(range(4, 8), tp=4)),
    "dp 3 to dp 2 tp 2": Placement(source=_grid(range(3), dp=3), target=_grid(range(4, 8), dp=2, tp=2)),
    "dp 4 to cp 2 tp 2 sp": Placement(
        source=_grid(range(4), dp=4), target=_grid(range(4, 8), cp=2, tp=2), sliced=(False, True)
    ),
    "cp 2 tp 2 sp to cp 4": Placement(
        source=_grid(range(4), cp=2, tp=2), target=_grid(range(4, 8), cp=4), sliced=(True, False)
    ),
    "overlapping, dp 2 tp 3 to cp 2 tp 2 sp": Placement(
        source=_grid(range(6), dp=2, tp=3), target=_grid(range(4, 8), cp=2, tp=2), sliced=(False, True)
    ),
    "colocated, dp 2 tp 4 to dp 4 tp 2": Placement(
        source=_grid(range(8), dp=2, tp=4), target=_grid(range(8), dp=4, tp=2)
    ),
    "colocated, dp 2 tp 4 to dp 2 tp 4 sp": Placement(
        source=_grid(range(8), dp=2, tp=4), target=_grid(range(8), dp=2, tp=4), sliced=(False, True)
    ),
}
