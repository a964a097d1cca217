"""Learned positions of grids of any size: PyTorch's own resizing, written as products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import interpolate

from mimo_encoder_vision._positions import resized_positions

SIDE, WIDTH = 6, 5


def _check_resizing(_rank: int, mode: str, down: int, across: int) -> None:
    table = torch.randn(SIDE * SIDE, WIDTH, requires_grad=True)
    square = table.T.view(1, WIDTH, SIDE, SIDE)
    antialias = mode == "bilinear"
    wanted = interpolate(square, (down, across), mode=mode, align_corners=False, antialias=antialias)
    wanted = wanted[0].flatten(1).T
    found = resized_positions(table, (down, across), antialias=antialias)
    torch.testing.assert_close(found, wanted)
    gradient = torch.randn(down * across, WIDTH)
    (of_found,), (of_wanted,) = (torch.autograd.grad(each, table, gradient) for each in (found, wanted))
    torch.testing.assert_close(of_found, of_wanted)


@pytest.mark.parametrize(("down", "across"), [(SIDE, SIDE), (1, 1), (2, 4), (3, 17), (6, 9), (25, 13)])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_positions_are_the_table_resized(
    run_ranks: Callable[..., list[Any]], mode: str, down: int, across: int
) -> None:
    """Both of a family's filters and their gradients, to fewer patches and more, of any shape."""
    run_ranks(1, _check_resizing, mode, down, across)
