"""The boundary between lanes alone, in one process: many to few, few to many, equally many; and what it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mimo.schedule import End, Route, Traffic, boundary_route
from mimo.schedule.runtime import Boundary, Channel
from mimo.topology import Grid, Ownership

WIDTH = 3
ROWS = (2, 0, 5, 1, 0, 3)
"""Of each sample: uneven, and some without any."""


@attrs.define
class Wire:
    """What carries messages between boundaries of one process: in order for each pair, and it notes what is called."""

    mail: dict[tuple[int, int], list[Tensor]] = attrs.field(factory=dict)
    calls: list[tuple[str, int]] = attrs.field(factory=list)


@attrs.frozen
class Exchange:
    """A message that is filled in when it is waited for."""

    wire: Wire
    peer: int
    fill: tuple[tuple[int, int], Tensor] | None = None

    def is_completed(self) -> bool:
        """Return whether the message has arrived."""
        return True

    def wait(self) -> None:
        """Note that somebody waits, and deliver."""
        self.wire.calls.append(("wait", self.peer))
        if self.fill is not None:
            pair, rows = self.fill
            rows.copy_(self.wire.mail[pair].pop(0))


@attrs.frozen(kw_only=True)
class Line(Channel):
    """A channel of one rank on a wire."""

    wire: Wire
    rank: int

    def send(self, rows: Tensor, peer: int) -> dist.Work:
        """Put a copy into the mail."""
        self.wire.calls.append(("send", peer))
        self.wire.mail.setdefault((self.rank, peer), []).append(rows.clone())
        return cast("dist.Work", Exchange(self.wire, peer))

    def receive(self, rows: Tensor, peer: int) -> dist.Work:
        """Fill ``rows`` when waited for."""
        self.wire.calls.append(("receive", peer))
        return cast("dist.Work", Exchange(self.wire, peer, ((peer, self.rank), rows)))


def boundary_of(rank: int, forward: Wire, backward: Wire) -> Boundary:
    """Return the boundary of a rank whose tensor group is itself."""
    channels = tuple(Line(group=None, tag=0, wire=wire, rank=rank) for wire in (forward, backward))
    return Boundary(
        rank=rank,
        width=WIDTH,
        dtype=torch.float32,
        device=torch.device("cpu"),
        channels=(channels[0], channels[1]),
        source_group=None,
        target_group=None,
    )


def ends(sources: Sequence[int], targets: Sequence[int]) -> tuple[End, End]:
    """Return two ends whose lanes are single ranks."""
    source, target = (
        End(grid=Grid(name=name, ranks=ranks, dp=len(ranks)), stage=0, owners=Ownership.even(len(ROWS), len(ranks)))
        for name, ranks in (("source", sources), ("target", targets))
    )
    return source, target


def lane(rows: Tensor, end: End, number: int) -> Tensor:
    """Return the rows of one lane."""
    bounds = [sum(ROWS[:bound]) for bound in end.owners.bounds]
    return rows[bounds[number] : bounds[number + 1]]


@pytest.mark.parametrize(
    ("sources", "targets"),
    [((0, 1, 2), (3,)), ((0,), (1, 2, 3)), ((0, 1), (2, 3)), ((0, 1, 2), (3, 4)), ((0, 1), (1, 2)), ((0, 1), (0, 1))],
    ids=["fan-in", "fan-out", "equal lanes", "3 to 2", "overlapping", "colocated"],
)
def test_schedule_lanes_receive_their_samples_and_sources_their_gradients_to_the_bit(
    sources: tuple[int, ...], targets: tuple[int, ...]
) -> None:
    """A lane's rows are its samples', whichever lanes they come from; a source lane's gradient is its slice of all."""
    source, target = ends(sources, targets)
    wires = Wire(), Wire()
    ranks = sorted({*sources, *targets})
    boundaries = {rank: boundary_of(rank, *wires) for rank in ranks}
    routes = {rank: boundary_route(rank=rank, source=source, target=target, rows=ROWS) for rank in ranks}
    rows, gradients = torch.randn(2, sum(ROWS), WIDTH)
    rows[0], gradients[0] = -0.0, torch.nan  # which no arithmetic would leave as they are

    for number, rank in enumerate(sources):
        boundaries[rank].send(routes[rank], 0, lane(rows, source, number))
    for number, rank in enumerate(targets):
        found = boundaries[rank].receive(routes[rank], 0).wait()
        assert same_bits(found, lane(rows, target, number))
        boundaries[rank].send_gradient(routes[rank], 0, lane(gradients, target, number))
    for number, rank in enumerate(sources):
        found = boundaries[rank].receive_gradient(routes[rank], 0).wait()
        assert same_bits(found, lane(gradients, source, number))
    for boundary in boundaries.values():
        boundary.flush()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Compare bit patterns, so that zeros have signs and NaNs are equal."""
    return torch.equal(one.view(torch.int32), other.contiguous().view(torch.int32))


def fan(sources: tuple[int, ...], targets: tuple[int, ...], rank: int) -> tuple[Boundary, Route, Wire]:
    """Return one rank's side of a boundary, and the wire of its rows."""
    source, target = ends(sources, targets)
    wire = Wire()
    route = boundary_route(rank=rank, source=source, target=target, rows=ROWS)
    return boundary_of(rank, wire, Wire()), route, wire


def test_schedule_all_peers_of_a_transfer_begin_before_any_is_waited_for() -> None:
    """Receives from all are posted when the first is, and sending to all waits for nobody."""
    boundary, route, wire = fan((0, 1, 2), (3,), 3)
    pending = boundary.receive(route, 0)
    assert wire.calls == [("receive", 0), ("receive", 1), ("receive", 2)]
    for peer, rows in enumerate((2, 6, 3)):
        wire.mail[peer, 3] = [torch.zeros(rows, WIDTH)]
    pending.wait()
    assert wire.calls[3:] == [("wait", 0), ("wait", 1), ("wait", 2)]
    boundary, route, wire = fan((0,), (1, 2, 3), 0)
    boundary.send(route, 0, torch.zeros(sum(ROWS), WIDTH))
    assert wire.calls == [("send", 1), ("send", 2), ("send", 3)]
    boundary.flush()
    assert [call for call, _ in wire.calls[3:]] == ["wait"] * 3


def test_schedule_a_boundary_counts_what_it_sends() -> None:
    """Rows and bytes for others, forward and as gradients, and rows for itself; asking begins anew."""
    boundary, route, _ = fan((0, 1), (1, 2), 1)  # of rank 1's four rows none is its own as a target
    boundary.send(route, 0, torch.zeros(route.held, WIDTH))
    boundary.send_gradient(route, 0, torch.zeros(route.wanted, WIDTH))
    expected = Traffic(rows_sent=4, bytes_sent=48, gradient_rows_sent=7, gradient_bytes_sent=84)
    assert Traffic.of(route, rank=1, row_bytes=4 * WIDTH, gradient=True) == expected
    assert boundary.take_traffic() == expected
    assert boundary.take_traffic() == Traffic()
    boundary, route, wire = fan((0, 1), (0, 1), 0)
    boundary.send(route, 0, torch.zeros(route.held, WIDTH))
    assert boundary.take_traffic() == Traffic(rows_in_place=7)
    assert Traffic.of(route, rank=0, row_bytes=4 * WIDTH, gradient=False) == Traffic(rows_in_place=7)
    assert wire.calls == []
