"""The boundary between modules beside the same messages without it, and beside the usual way of moving rows.

*raw*: the same bytes between the same ranks by ``isend`` and ``irecv``, into tensors made for them. *usual*: each
lane's leader sends the target group's leader a shape and all its rows, which the group then gets by broadcast,
shape first; each rank throws all but its slice away. Eight ranks on gloo, one thread each; a source of two lanes of two
tensor ranks feeds four tensor ranks under sequence parallelism. All take turns in one run; a turn takes as long as its
slowest rank. Bytes are counted where they are sent, and the fewest possible from who needs what.
``nox -s bench -- boundary [--rounds N]`` prints a table, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import _route_time
import attrs
import torch
import torch.distributed as dist
from _forked import in_ranks
from _placement import PLACEMENTS, TIMED, Placement
from torch import Tensor

from mimo.schedule import RoutePiece, boundary_route
from mimo.schedule.runtime import Boundary, Channel

WORLD = 8
WIDTH = 1024
ROW_BYTES = 4 * WIDTH
SHARES = (5, 0, 3, 8)
"""Rows of a microbatch's samples, in proportion."""
TURNS = {1: 50, 16: 8}
"""Times that a microbatch of so many MiB is moved in each turn."""
Ways = Mapping[str, Callable[[], Tensor | None]]


@attrs.frozen(kw_only=True)
class CountedChannel(Channel):
    """A channel that keeps the size of every message."""

    sent: list[int] = attrs.field(factory=list)

    def send(self, rows: Tensor, peer: int) -> dist.Work:
        """Start sending."""
        self.sent.append(rows.numel() * rows.element_size())
        return super().send(rows, peer)


class Mover:
    """One rank's part in moving a microbatch of so many rows over a placement, in each way."""

    def __init__(
        self, rank: int, placement: Placement, rows: Sequence[int], groups: Mapping[str, dist.ProcessGroup]
    ) -> None:
        source, target = placement.ends(rows)
        self.rank, self.placement = rank, placement
        self.route = boundary_route(rank=rank, source=source, target=target, rows=rows)
        self.channels = tuple(CountedChannel(group=None, tag=tag) for tag in (0, 1))
        self.is_source, self.is_target = (rank in end.grid.stage_ranks(end.stage) for end in (source, target))
        every = torch.randn(sum(rows), WIDTH, generator=torch.Generator().manual_seed(0))
        self.rows = every[placement.held_by(rank, rows)]
        self.groups = groups
        own = [
            groups.get(str(end.grid.group_of(rank, ("tp",)))) if rank in end.grid else None for end in (source, target)
        ]
        self.boundary = Boundary(
            rank=rank,
            width=WIDTH,
            dtype=torch.float32,
            device=torch.device("cpu"),
            channels=(self.channels[0], self.channels[1]),
            source_group=own[0],
            target_group=own[1],
        )

    def ours(self) -> Tensor | None:
        """Move rows over the boundary."""
        arriving = self.boundary.receive(self.route, 0) if self.is_target else None
        if self.is_source:
            self.boundary.send(self.route, 0, self.rows)
        found = arriving.wait() if arriving else None
        self.boundary.flush()
        return found

    def raw(self) -> Tensor | None:
        """Send the same messages, here each of them one span, without anything around them."""
        found = torch.empty(self.route.wanted, WIDTH) if self.is_target else None
        works = [dist.irecv(found[_span(piece)], piece.peer) for piece in self.route.receives if found is not None]
        works += [dist.isend(self.rows[_span(piece)], piece.peer) for piece in self.route.sends]
        for work in works:
            assert work is not None
            work.wait()
        return found

    def usual(self) -> Tensor | None:
        """Exchange shapes, send from leader to leader, and broadcast: everything to everybody."""
        source, target = self.placement.source, self.placement.target
        leaders, leader = [source.rank_at(dp=lane) for lane in range(source.dp)], target.ranks[0]
        if self.rank in leaders:
            dist.send(torch.tensor(self.rows.shape), leader)
            if len(self.rows):
                dist.send(self.rows, leader)
        if not self.is_target:
            return None
        shape = torch.zeros(2, dtype=torch.long)
        if self.rank == leader:
            shapes = [torch.zeros(2, dtype=torch.long) for _ in leaders]
            for work in [dist.irecv(one, peer) for one, peer in zip(shapes, leaders, strict=True)]:
                assert work is not None
                work.wait()
            shape[:] = torch.stack(shapes).sum(0)
            shape[1] = shapes[0][1]
        group = self.groups[str(target.ranks)]
        dist.broadcast(shape, leader, group=group)
        rows = torch.empty(*shape.tolist())
        if self.rank == leader:
            parts = torch.split(rows, [int(one[0]) for one in shapes])
            works = [dist.irecv(part, peer) for part, peer in zip(parts, leaders, strict=True) if len(part)]
            for work in works:
                assert work is not None
                work.wait()
        dist.broadcast(rows, leader, group=group)
        return rows.chunk(target.tp)[target.coordinates(self.rank).tp]


def _span(piece: RoutePiece) -> slice:
    (span,) = piece.spans
    return slice(*span)


def rows_of(mib: int) -> list[int]:
    """Return rows of each sample that come to so many MiB."""
    return [mib * 2**20 // ROW_BYTES * share // sum(SHARES) for share in SHARES]


def count_bytes(rank: int, groups: Mapping[str, dist.ProcessGroup]) -> dict[str, tuple[int, int]]:
    """Return for each placement the bytes that all ranks send, there and back, and the fewest that they must."""
    found = {}
    for name, placement in PLACEMENTS.items():
        rows = rows_of(1)
        mover = Mover(rank, placement, rows, groups)
        arrived = mover.ours()
        back = mover.boundary.receive_gradient(mover.route, 0) if mover.is_source else None
        if arrived is not None:
            mover.boundary.send_gradient(mover.route, 0, arrived)
        if back is not None:
            assert torch.equal(back.wait(), mover.rows)
        mover.boundary.flush()
        total = torch.tensor(sum(sum(channel.sent) for channel in mover.channels))
        dist.all_reduce(total)
        found[name] = int(total), 2 * placement.fewest(rows) * ROW_BYTES
    return found


def time_ways(rank: int, rounds: int, groups: Mapping[str, dist.ProcessGroup]) -> dict[int, dict[str, list[float]]]:
    """Return the slowest rank's seconds a microbatch, by MiB, way and turn."""
    found: dict[int, dict[str, list[float]]] = {}
    for mib, turns in TURNS.items():
        mover = Mover(rank, TIMED, rows_of(mib), groups)
        ways: Ways = {"ours": mover.ours, "raw": mover.raw, "usual": mover.usual}
        arrived = [way() for way in ways.values()]
        if mover.is_target:
            assert all(one is not None and one.shape == (mover.route.wanted, WIDTH) for one in arrived), arrived
        found[mib] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                dist.barrier()
                start = time.perf_counter()
                for _ in range(turns):
                    way()
                took = torch.tensor((time.perf_counter() - start) / turns)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                found[mib][name].append(float(took))
    return found


def measure(rank: int, rounds: int) -> tuple[dict[str, tuple[int, int]], dict[int, dict[str, list[float]]]]:
    """Return what this rank counts and measures."""
    grids = [grid for placement in PLACEMENTS.values() for grid in (placement.source, placement.target)]
    members = dict.fromkeys(ranks for grid in grids for ranks in grid.groups(("tp",)))
    groups = {str(ranks): group for ranks in members if isinstance(group := dist.new_group(ranks), dist.ProcessGroup)}
    return count_bytes(rank, groups), time_ways(rank, rounds, groups)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each, of which the median counts")
    rounds = parser.parse_args().rounds
    ratios, aims, spread = {}, {}, {}

    def report(what: str, values: Sequence[float], relation: str, aim: float) -> None:
        ratios[what], spread[what] = statistics.median(values), [min(values), max(values)]
        aims[what] = [relation, aim]
        print(f"{what}: {ratios[what]:.3f} ({min(values):.3f}-{max(values):.3f}), aim {relation} {aim}")

    counted, times = in_ranks(measure, world=WORLD, rounds=rounds)
    for name, (sent, fewest) in counted.items():
        print(f"{name}: {sent / 2**20:.3f} MiB sent, there and back, {fewest / 2**20:.3f} needed")
    # Where none must be sent, any that are would be too many.
    excess = [sent / fewest if fewest else math.inf if sent else 1.0 for sent, fewest in counted.values()]
    report(f"bytes sent / fewest possible, worst of {len(excess)} placements", [max(excess)], "<=", 1.0)
    for mib, ways in times.items():
        for name, seconds in ways.items():
            print(f"{mib} MiB, {name}: {statistics.median(seconds) * 1e3:.2f} ms")
        pairs = list(zip(ways["ours"], ways["raw"], ways["usual"], strict=True))
        report(f"time, {mib} MiB, ours / raw", [ours / raw for ours, raw, _ in pairs], "<=", 1.25)
        report(f"time, {mib} MiB, usual / ours", [usual / ours for ours, _, usual in pairs], ">=", 2.0)
    for placement in _route_time.PLACEMENTS:
        turns = [
            statistics.median(1e3 * seconds for seconds in _route_time.measure(placement, ranks=128))
            for _ in range(rounds)
        ]
        report(f"ms a rank to find routes, 1,024 ranks, {placement}", turns, "<=", 1.0)
    print(json.dumps({"bench": "boundary", "ratios": ratios, "aims": aims, "runs": rounds, "spread": spread}))


if __name__ == "__main__":
    main()
