"""How matrices are cut and shared out: numbers alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from mimo_optimizer_muon._matrices import Shape, newton_schulz_work, piece_length, piece_shape, share_out

SIDES = st.integers(1, 40)
SHAPES = st.lists(st.tuples(SIDES, SIDES), max_size=30)
SIZES = st.lists(st.integers(1, 4), max_size=3)


def _check_lengths(_rank: int) -> None:
    for length, pieces in itertools.product(range(1, 25), range(1, 9)):
        expected = [len(piece) for piece in torch.arange(length).chunk(pieces)]
        found = [piece_length(length, pieces, index) for index in range(pieces)]
        assert found == expected + [0] * (pieces - len(expected)), (length, pieces)


def test_pieces_are_those_of_torch(run_ranks: Callable[..., list[Any]]) -> None:
    """Uneven and empty pieces are as long as `torch.chunk` makes them."""
    run_ranks(1, _check_lengths)


def test_nested_cuts_cut_what_is_left() -> None:
    """A later axis cuts the piece that the one before it left, along the same dim or the other."""
    assert piece_shape((7, 5), (0, 0), (2, 2), (0, 1)) == (2, 5)
    assert piece_shape((7, 5), (0, 0), (2, 2), (1, 1)) == (1, 5)
    assert piece_shape((7, 5), (1, 0), (3, 2), (2, 0)) == (4, 1)
    assert piece_shape((7, 5), (0, 0), (4, 2), (3, 1)) == (0, 5)
    assert piece_shape((7, 5), (), (), ()) == (7, 5)


@given(shape=st.tuples(SIDES, SIDES), sizes=SIZES, data=st.data())
def test_all_pieces_together_are_the_whole(shape: Shape, sizes: list[int], data: st.DataObject) -> None:
    """No element is lost or held twice, whatever the axes cut."""
    dims = [data.draw(st.integers(0, 1)) for _ in sizes]
    places = itertools.product(*(range(size) for size in sizes))
    assert sum(math.prod(piece_shape(shape, dims, sizes, place)) for place in places) == math.prod(shape)


@given(shapes=SHAPES, sizes=SIZES)
def test_work_is_shared_out_evenly(shapes: list[Shape], sizes: list[int]) -> None:
    """Each matrix has an owner among the ranks, and the busiest has at most one matrix more than its share."""
    owners = share_out(shapes, sizes)
    assert len(owners) == len(shapes)
    loads = dict.fromkeys(itertools.product(*(range(size) for size in sizes)), 0)
    for owner, shape in zip(owners, shapes, strict=True):
        loads[owner] += newton_schulz_work(shape)
    works = [newton_schulz_work(shape) for shape in shapes]
    assert max(loads.values()) <= sum(works) / len(loads) + max(works, default=0)


def test_matrices_of_one_shape_go_round() -> None:
    """Of nine matrices of one shape four ranks have two or three each."""
    owners = share_out([(8, 8)] * 9, [2, 2])
    assert sorted(owners.count(owner) for owner in set(owners)) == [2, 2, 2, 3]
    assert owners[:5] == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0)]
