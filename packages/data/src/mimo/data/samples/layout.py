"""Where every token and item of a sample lies; S tokens of one sample, placeholder rows included."""

from __future__ import annotations

from collections.abc import Collection

import attrs
import numpy as np
from numpy.typing import NDArray

from mimo.data.samples.grid_positions import Grid, grid_positions
from mimo.hooks import ItemInfo

NO_LABEL = -100
"""Label of a position whose next token is not to be learned."""


@attrs.frozen(kw_only=True)
class PlacedItem:
    """An item, and where its rows lie in its sample.

    Args:
        info: of the item.
        runs: begin and end of each run of positions that its encoder's rows take, ascending; at least one if it is
            read. Between them lies text of the item.
        grid: of the rows.
        is_broken: it can't be decoded, so that its rows are zeros, and nothing is learned of making it.
        asked: begin and end of the positions of the placeholder that calls for it, before its rows if it has some; None
            for one that is only read.
        made_from: begin and end of the positions of the rows from which it is made, maybe none; None likewise.
    """

    info: ItemInfo
    runs: tuple[tuple[int, int], ...]
    grid: Grid | None = None
    is_broken: bool = False
    asked: tuple[int, int] | None = None
    made_from: tuple[int, int] | None = None

    @property
    def start(self) -> int:
        """Position of its first row, or that of its placeholder."""
        return self.runs[0][0] if self.asked is None else self.asked[0]

    @property
    def stop(self) -> int:
        """Position behind its last row."""
        return self.runs[-1][1] if self.runs or self.asked is None else self.asked[1]

    @property
    def rows(self) -> int:
        """How many rows its encoder makes of it."""
        return sum(stop - start for start, stop in self.runs)


@attrs.frozen(kw_only=True, eq=False)
class SampleLayout:
    """One sample as the language model sees it.

    Args:
        sample: its number in the dataset.
        tokens: ids ``[S]``; an item is its placeholder's id, once for each of its rows, and the text between these; one
            that is made is the same id for each row that calls for it.
        labels: ``[S]``; the id to be predicted at each position, or `NO_LABEL`.
        items: the items that lie in it, by position.
        truncated: whether something was cut off to keep S within the limit.
        weights: ``[S]`` of each label, that of the token to be predicted; 0 where there is none. None: each is 1.
    """

    sample: int
    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    items: tuple[PlacedItem, ...]
    truncated: bool
    weights: NDArray[np.float32] | None = None

    def broken(self, indices: Collection[int]) -> SampleLayout:
        """Return the sample as one of which nothing is learned, as the items of these indices can't be decoded."""
        items = tuple(attrs.evolve(item, is_broken=item.info.index in indices) for item in self.items)
        return attrs.evolve(self, weights=np.zeros(len(self.tokens), dtype=np.float32), items=items)

    @property
    def targets(self) -> NDArray[np.bool_]:
        """Tell of each row ``[S]`` whether it is learned from: whether it has a label whose weight is not 0."""
        return self.labels != NO_LABEL if self.weights is None else self.weights > 0

    @property
    def label_weight(self) -> float:
        """The sum of the weights of its labels."""
        return float(np.count_nonzero(self.targets) if self.weights is None else self.weights.sum(dtype=np.float64))

    def items_of(self, modality: str) -> tuple[PlacedItem, ...]:
        """Return the items of a modality that are read, by position."""
        return tuple(item for item in self.items if item.runs and item.info.modality == modality)

    def made(self, modality: str) -> tuple[PlacedItem, ...]:
        """Return the items of a modality that are to be made, by position."""
        return tuple(item for item in self.items if item.asked is not None and item.info.modality == modality)

    @property
    def is_broken(self) -> bool:
        """Whether an item of it can't be decoded, so that nothing of it is learned."""
        return any(item.is_broken for item in self.items)

    @property
    def grid_positions(self) -> NDArray[np.int64] | None:
        """Places ``[S, 3]`` in time, down and across of all rows; None where none lies in a grid."""
        grids = [(item.runs[0][0], item.grid) for item in self.items if item.grid is not None]
        return grid_positions(len(self.tokens), grids) if grids else None
