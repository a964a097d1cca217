"""Rows of an encoder that lie in slices on several ranks: dropped, repeated and reordered as one rank does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from mimo.model.runtime import ContextAxis, PackedRows, TensorAxis, touched_by

TOTALS = (11, 8, 1, 0)
WIDTH = 3


def _rows(total: int) -> Tensor:
    return torch.arange(total * WIDTH, dtype=torch.float32).view(total, WIDTH).sin()


def _index(total: int) -> Tensor:
    """Return every third row twice, the last first; none of no rows."""
    return torch.arange(total).flip(0)[::3].repeat_interleave(2)


def _weights(count: int) -> Tensor:
    return torch.arange(count * WIDTH, dtype=torch.float32).view(count, WIDTH).cos()


def _on_one_rank(total: int) -> tuple[Tensor, Tensor]:
    """Return what is taken, and the gradient of the rows."""
    rows = _rows(total).requires_grad_()
    taken = PackedRows().take(rows, _index(total), total=total)
    (taken * _weights(len(taken))).sum().backward()
    assert rows.grad is not None
    return taken.detach(), rows.grad


def _on_ranks(_rank: int, cp: int, tp: int, sequence_parallel: bool) -> list[tuple[range, Tensor, range, Tensor]]:
    mesh = init_device_mesh("cpu", (cp, tp), mesh_dim_names=("cp", "tp"))
    packed = PackedRows(
        axis=TensorAxis.of(mesh["tp"], sequence_parallel=sequence_parallel),
        context=ContextAxis.of(mesh["cp"].get_group()),
    )
    found = []
    for total in TOTALS:
        held = packed.held(total)
        rows = packed.pad(_rows(total)[held.start : held.stop], total=total).requires_grad_()
        taken = packed.take(rows, _index(total), total=total)
        mine = packed.held(len(_index(total)))
        weights = packed.pad(_weights(len(_index(total)))[mine.start : mine.stop], total=len(_index(total)))
        (taken * weights).sum().backward()
        assert rows.grad is not None
        found.append((held, rows.grad, mine, taken.detach()))
    return found


@pytest.mark.parametrize(
    ("cp", "tp", "sequence_parallel"), [(2, 1, False), (1, 2, True), (2, 2, True), (2, 2, False), (3, 1, False)]
)
def test_rows_are_taken_from_wherever_they_lie(
    run_ranks: Callable[..., list[Any]], cp: int, tp: int, *, sequence_parallel: bool
) -> None:
    """Each rank gets its slice of the taken rows, zeros beyond the end, and the gradient of the rows it holds."""
    ranks = run_ranks(cp * tp, _on_ranks, cp, tp, sequence_parallel)
    for number, total in enumerate(TOTALS):
        expected, gradient = _on_one_rank(total)
        for found in ranks:
            held, got, mine, taken = found[number]
            here = expected[mine.start : mine.stop]
            assert torch.equal(taken[: len(here)], here)
            assert len(taken) == len(mine)
            assert not taken[len(here) :].any()
            of_rows = gradient[held.start : held.stop]
            assert torch.allclose(got[: len(of_rows)], of_rows)
            assert not got[len(of_rows) :].any()


@pytest.mark.parametrize(
    ("rows", "items", "inside"),
    [
        (range(4), slice(0, 2), slice(0, 4)),
        (range(3, 5), slice(1, 3), slice(0, 2)),
        (range(4, 9), slice(2, 4), slice(0, 5)),
        (range(9, 12), slice(4, 5), slice(0, 3)),
    ],
)
def test_the_items_that_a_slice_touches_are_found(rows: range, items: slice, inside: slice) -> None:
    """Of items with 3, 1, 4 and 1 rows: those of which a row lies in the slice, and where its rows are in them."""
    assert touched_by(rows, (3, 1, 4, 1)) == (items, inside)
