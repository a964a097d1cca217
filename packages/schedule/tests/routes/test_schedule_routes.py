"""Routes between random placements, seen from all ranks at once."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo.schedule import Cut, End, Route, RoutePiece, Span, boundary_route, pipeline_route
from mimo.topology import Grid, Ownership

WORLD = 12


def numbers(spans: Iterable[Span]) -> list[int]:
    """Return the rows of spans, one by one."""
    return [row for start, stop in spans for row in range(start, stop)]


def routes_of(edge: Any) -> dict[int, Route]:
    """Return the route of every rank."""
    return {
        rank: boundary_route(rank=rank, source=edge.source, target=edge.target, rows=edge.rows)
        for rank in range(edge.world)
    }


def messages(pieces: Iterable[RoutePiece], tensor: list[int]) -> dict[int, list[int]]:
    """Return the edge's rows of each piece, in order, by peer."""
    return {piece.peer: [tensor[row] for row in numbers(piece.spans)] for piece in pieces}


@given(choice=st.randoms(use_true_random=False))
@settings(max_examples=400, deadline=None)
def test_schedule_routes_send_each_row_once(choice: random.Random, draw_edge: Callable[..., Any]) -> None:
    """Both ends mean the same rows in the same order; each arrives once, and never from afar where it is already."""
    edge = draw_edge(choice, WORLD)
    held, wanted, routes = edge.rows_of(edge.source), edge.rows_of(edge.target), routes_of(edge)
    arrived: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for rank, route in routes.items():
        assert route.held == len(held.get(rank, []))
        assert route.wanted == len(wanted.get(rank, []))
        for peer, rows in messages(route.sends, held.get(rank, [])).items():
            assert rows
            assert messages(routes[peer].receives, wanted[peer])[rank] == rows
            for row in rows:
                arrived[row].append((rank, peer))
                assert rank == peer or row not in held.get(peer, []), "it was there already"
    for rank, route in routes.items():
        assert len(messages(route.receives, wanted.get(rank, []))) == len(route.receives), "one message a peer"
        assert sum(piece.rows for piece in route.receives) == sum(
            rank == peer for to in arrived.values() for _, peer in to
        )
    for cell in edge.cells(edge.target):
        for row in wanted[cell[0]]:
            stays = all(row in held.get(rank, []) for rank in cell)
            assert sorted(arrived[row]) == [(rank, rank) for rank in cell] if stays else len(arrived[row]) == 1


@given(choice=st.randoms(use_true_random=False))
@settings(max_examples=400, deadline=None)
def test_schedule_routes_join_what_ranks_share(choice: random.Random, draw_edge: Callable[..., Any]) -> None:
    """All ranks of a cell agree on who brings which rows, each row once, by one who has it; the rest all have."""
    edge = draw_edge(choice, WORLD)
    routes = routes_of(edge)
    sources = {rank: (route.sends, route.source_join) for rank, route in routes.items()}
    targets = {rank: (route.receives, route.target_join) for rank, route in routes.items()}
    for end, found in ((edge.source, sources), (edge.target, targets)):
        tensors = edge.rows_of(end)
        for cell in edge.cells(end):
            (join,) = {found[rank][1] for rank in cell}
            brought = [numbers(spans) for spans in join] or [[]] * len(cell)
            has = [{row for piece in found[rank][0] for row in numbers(piece.spans)} for rank in cell]
            assert all(set(rows) <= own for rows, own in zip(brought, has, strict=True))
            together = sorted(row for rows in brought for row in rows)
            assert len(together) == len(set(together))
            alone = set(range(len(tensors[cell[0]]))) - set(together)
            assert all(alone <= own for own in has)


def test_schedule_routes_keep_rows_of_the_same_ranks_in_place() -> None:
    """Colocated cells with the same rows move nothing and put nothing together."""
    grid = Grid(name="both", ranks=range(8), dp=2, cp=2, tp=2)
    end = End(grid=grid, stage=0, owners=Ownership.even(4, 2), cut=lambda _: Cut((0, 1, 3, 4), (0, 1, 0)))
    assert boundary_route(rank=5, source=end, target=end, rows=(2, 2, 0, 4)) == Route(
        held=2, sends=(RoutePiece(5, ((0, 2),)),), wanted=2, receives=(RoutePiece(5, ((0, 2),)),)
    )


def test_schedule_routes_slice_in_place_under_sequence_parallelism() -> None:
    """A replicated source hands each of its own ranks its slice; only gradients are then put together."""
    grid = Grid(name="both", ranks=(3, 4), tp=2)
    owners = Ownership.even(2, 1)
    source = End(grid=grid, stage=0, owners=owners)
    target = End(grid=grid, stage=0, owners=owners, sequence_parallel=True, cut=lambda _: Cut((0, 5, 6), (0, 1)))
    assert boundary_route(rank=4, source=source, target=target, rows=(2, 4)) == Route(
        held=6,
        sends=(RoutePiece(4, ((5, 6),)),),
        source_join=(((0, 5),), ((5, 6),)),
        wanted=1,
        receives=(RoutePiece(4, ((0, 1),)),),
    )


def test_schedule_routes_send_several_spans_as_one_message() -> None:
    """A context rank's early and late rows come from one source together."""
    source = End(grid=Grid(name="source", ranks=(0,)), stage=0, owners=Ownership.even(1, 1))
    target = End(
        grid=Grid(name="target", ranks=(1, 2), cp=2),
        stage=0,
        owners=Ownership.even(1, 1),
        cut=lambda _: Cut((0, 2, 7, 9), (0, 1, 0)),
    )
    route = boundary_route(rank=0, source=source, target=target, rows=(9,))
    assert route.sends == (RoutePiece(1, ((0, 2), (7, 9))), RoutePiece(2, ((2, 7),)))
    route = boundary_route(rank=1, source=source, target=target, rows=(9,))
    assert route.receives == (RoutePiece(0, ((0, 4),)),)


@pytest.mark.parametrize("rows", [0, 3])
def test_schedule_routes_between_stages_go_from_like_to_like(rows: int) -> None:
    """A pipeline's message goes to the rank of the same lane, context and tensor coordinates, if it has rows."""
    grid = Grid(name="language", ranks=range(8), pp=2, cp=2, tp=2)
    piece = (RoutePiece(6, ((0, rows),)),) if rows else ()
    assert pipeline_route(grid, rank=2, source=0, target=1, rows=rows) == Route(held=rows, sends=piece)
    back = (RoutePiece(2, ((0, rows),)),) if rows else ()
    assert pipeline_route(grid, rank=6, source=0, target=1, rows=rows) == Route(wanted=rows, receives=back)
