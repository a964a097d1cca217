"""Learned rows of the encoder: those before each image's patches, and the table of which images take crops.

Shapes: T patches, W width, S side of the table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from mimo.model.runtime import to_device
from mimo_encoder_radio._grids import Grid

_STD = 0.02  # of initial values, as RADIO's


class Prefix(nn.Module):
    """Class tokens and registers."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the rows."""
        nn.init.normal_(self.weight, std=_STD)

    def forward(self) -> Tensor:
        """Return the rows [prefix, W]."""
        return self.weight


class Positions(nn.Module):
    """Cropped position embeddings: a square table, resized to each grid's longer side, of which the corner is taken.

    So any aspect ratio has the same distances in both directions (Ranzinger et al. 2024, arXiv:2312.06709, section
    3.3.2; in evaluation the crop is not a random one).

    Args:
        side: S.
        width: W.
    """

    def __init__(self, side: int, width: int) -> None:
        super().__init__()
        self.side = side
        self.weight = nn.Parameter(torch.empty(side * side, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table."""
        nn.init.normal_(self.weight, std=_STD)

    def forward(self, grids: Sequence[Grid], rows: slice) -> Tensor:
        """Return the positions [T, W] of some patches, in float32 at least: computed for no others.

        Args:
            grids: of images, one after the other.
            rows: which of their patches.
        """
        table = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        places = {grid: corners(grid, side=self.side) for grid in {*grids, (0, 0)}}
        index, share = (torch.cat(each)[rows] for each in zip(*map(places.__getitem__, (*grids, (0, 0))), strict=True))
        # One pass with one gradient of the table, however many images there are.
        return functional.embedding_bag(
            to_device(index, table.device),
            table,
            per_sample_weights=to_device(share, table.device, table.dtype),
            mode="sum",
        )


def corners(grid: Grid, *, side: int) -> tuple[Tensor, Tensor]:
    """Return which four places of a square table each patch of a grid lies between, [T, 4], and their shares.

    That is bilinear interpolation to a square as large as the grid's longer side, centres of places and patches laid
    over each other, and the corner of that square.
    """
    down, across = (_between(count, side=side, longest=max(grid)) for count in grid)
    index, share = [], []
    for rows, of_rows in down:
        for columns, of_columns in across:
            index.append(torch.cartesian_prod(rows * side, columns).view(-1, 2).sum(1))
            share.append(torch.outer(of_rows, of_columns).flatten())
    return torch.stack(index, 1), torch.stack(share, 1).float()


def _between(count: int, *, side: int, longest: int) -> list[tuple[Tensor, Tensor]]:
    """Return the place before and the place after each of the first patches along one side, and their shares."""
    centre = ((torch.arange(count, dtype=torch.float64) + 0.5) * side / longest - 0.5).clamp(min=0)
    before = centre.long().clamp(max=side - 1)
    after = (before + 1).clamp(max=side - 1)
    return [(before, 1 - (centre - before)), (after, centre - before)]
