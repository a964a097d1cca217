"""The oracle itself: a wrong or missing copy on one rank is named, all read one truth, and a cover shows every pair."""

from __future__ import annotations

import fcntl
import itertools
import math
import multiprocessing
import random
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import attrs
import numpy as np
import torch
from cases import cover
from oracle import Oracle, Outcome, Piece, compare
from oracle import differences as outcome_differences
from tables import table
from truth import Truth

from mimo.testing import Pool

TRUE = torch.arange(12.0).view(3, 4)


def piece(*rows: int) -> Piece:
    """Return some rows of the truth."""
    places = np.concatenate([np.arange(4 * row, 4 * row + 4) for row in rows])
    return Piece(shape=(3, 4), values=TRUE.flatten().numpy()[places], places=places)


def differences(*pieces: Piece) -> list[str]:
    """Return what is wrong with what each rank holds."""
    return list(compare("x", dict(enumerate(pieces)), TRUE, 0.1))


def test_pieces_and_copies_that_agree_are_fine() -> None:
    """Whoever holds them, in whatever pieces."""
    assert differences(piece(0, 2), piece(1), piece(0, 1, 2)) == []
    assert Piece.of(TRUE).places.tolist() == list(range(12))
    assert differences(Piece.of(TRUE)) == []


def test_the_worst_copy_counts() -> None:
    """Though another rank holds a right one; and what is no number is as wrong as can be."""
    for wrong, off in ((0.5, "0.5"), (np.nan, "inf")):
        bad = attrs.evolve(piece(1), values=np.array([4.0, 5.0, 6.0, 7.0 + wrong]))
        assert differences(piece(0, 1, 2), bad) == differences(bad, piece(0, 1, 2)) == [f"x: off by {off}, allowed 0.1"]


def test_what_nobody_holds_and_another_shape_are_told() -> None:
    """Else a rank that has lost a shard would pass."""
    assert differences(piece(0), piece(2)) == ["x: no rank holds 4 of its 12 elements"]
    other = attrs.evolve(piece(0, 1, 2), shape=(4, 3))
    assert differences(piece(0, 1, 2), other) == ["rank 1: x: shape (4, 3), expected (3, 4)"]


class NewlyForked:
    """A pool that was gone, so that the process which it forks knows of all files that are open."""

    def __init__(self) -> None:
        self.runs = 0
        self.ours, theirs = multiprocessing.get_context("fork").Pipe()
        self.child = multiprocessing.get_context("fork").Process(target=theirs.recv)

    def run(self, *_task: object) -> list[Truth]:
        """Return a truth, with the child still there."""
        self.runs += 1
        self.child.start()
        tensors, others = ({"language.norm.weight": TRUE.clone()} for _ in range(2))
        return [Truth(losses=[0.1], terms={}, norms=[1 / 3], gradients=tensors, weights=others, gap=math.inf)]


def test_a_truth_is_computed_once_and_locked_no_longer(tmp_path: Path) -> None:
    """Whoever asks next reads the same numbers, without waiting for what the first has left running."""
    pool, settings = NewlyForked(), table({"language": {"ranks": [0]}})
    try:
        first = Oracle(cast("Pool", pool), tmp_path).truth(settings)
        (lock,) = tmp_path.glob("*.lock")
        with lock.open("w") as other:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        again = Oracle(cast("Pool", pool), tmp_path).truth(settings)
    finally:
        pool.child.kill()
        pool.child.join()
    assert pool.runs == 1
    differences = [(truth.losses, truth.norms, truth.gap) for truth in (first, again)]
    assert differences == [([0.1], [1 / 3], math.inf)] * 2
    assert torch.equal(again.weights["language.norm.weight"], TRUE)
    assert again.gradients.keys() == first.gradients.keys()


def test_each_term_counts() -> None:
    """Labels may be right though a teacher's or a generator's own term is not, or is missing."""
    truth = Truth(losses=[1.0], terms={"a.loss": [0.3]}, norms=[1.0], gradients={}, weights={}, gap=1.0)

    def lines_of(terms: dict[str, list[float]]) -> list[str]:
        found = Outcome(losses=[1.0], terms=terms, norms=[1.0], gradients={}, weights={})
        return list(outcome_differences(truth, [found]))

    assert lines_of({"a.loss": [0.3]}) == []
    assert lines_of({"a.loss": [0.31]}) == ["rank 0: first a.loss 0.31, expected 0.3"]
    assert lines_of({}) == ["rank 0: terms [], expected ['a.loss']"]


def test_a_cover_shows_each_pair_and_each_choice() -> None:
    """Of cases that nobody chose, with fewer of them than there are; what is shown elsewhere is not shown again."""
    source = random.Random(0)
    cases = {case: set(source.sample("abcdefgh", 3)) for case in range(60)}
    names = {case: {f"function {case % 4}", f"name {case % 9}"} for case in cases}

    def pairs(chosen: Iterable[int]) -> set[tuple[str, str]]:
        return {pair for case in chosen for pair in itertools.combinations(sorted(cases[case]), 2)}

    chosen = cover(cases, cost=lambda case: case, once=names.__getitem__)
    assert pairs(chosen) == pairs(cases)
    assert {name for case in chosen for name in names[case]} == {name for found in names.values() for name in found}
    assert len(chosen) < len(cases) / 2
    assert len(cover(cases, once=names.__getitem__, shown=cases.values())) == 9
