"""The oracle itself: a copy that is wrong on one rank alone, or that nobody holds, is told."""

from __future__ import annotations

import attrs
import numpy as np
import torch
from oracle import Piece, compare

TRUE = torch.arange(12.0).view(3, 4)


def piece(*rows: int) -> Piece:
    """Return some rows of the truth."""
    places = np.concatenate([np.arange(4 * row, 4 * row + 4) for row in rows])
    return Piece(shape=(3, 4), values=TRUE.flatten().numpy()[places], places=places)


def told(*pieces: Piece) -> list[str]:
    """Return what is wrong with what each rank holds."""
    return list(compare("x", dict(enumerate(pieces)), TRUE, 0.1))


def test_pieces_and_copies_that_agree_are_fine() -> None:
    """Whoever holds them, in whatever pieces."""
    assert told(piece(0, 2), piece(1), piece(0, 1, 2)) == []
    assert Piece.of(TRUE).places.tolist() == list(range(12))
    assert told(Piece.of(TRUE)) == []


def test_the_worst_copy_counts() -> None:
    """Though another rank holds a right one; and what is no number is as wrong as can be."""
    for wrong, off in ((0.5, "0.5"), (np.nan, "inf")):
        bad = attrs.evolve(piece(1), values=np.array([4.0, 5.0, 6.0, 7.0 + wrong]))
        assert told(piece(0, 1, 2), bad) == told(bad, piece(0, 1, 2)) == [f"x: off by {off}, allowed 0.1"]


def test_what_nobody_holds_and_another_shape_are_told() -> None:
    """Else a rank that has lost a shard would pass."""
    assert told(piece(0), piece(2)) == ["x: no rank holds 4 of its 12 elements"]
    other = attrs.evolve(piece(0, 1, 2), shape=(4, 3))
    assert told(piece(0, 1, 2), other) == ["rank 1: x: shape (4, 3), expected (3, 4)"]
