"""The endless stream of one part of a dataset: epoch by epoch, each a permutation that reads few shards at a time."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from mimo.data.order.permutation import Permutation

WINDOW_SHARDS = 8
"""Largest number of shards that are read at the same time."""
_SHARDS = 0
"""First number of the keys of permutations of shards; from 1 on they are of windows."""


class PartStream:
    """Names the samples of one part, position by position.

    An epoch has the shards in a new order, cut into windows of `WINDOW_SHARDS` at most, one after another, and within
    each window the samples of all its shards in a new order.

    Args:
        shards: number of samples of each; samples are numbered shard after shard.
        key: of this stream alone: seed and number of the part.
    """

    def __init__(self, shards: Sequence[int], key: tuple[int, int]) -> None:
        sizes = np.array(shards, dtype=np.int64)
        starts = np.cumsum(sizes) - sizes
        self._sizes, self._starts = sizes[sizes > 0], starts[sizes > 0]
        self._samples = int(sizes.sum())
        self._key = key
        # Only saves work: positions usually follow each other. What it holds never shows in a result.
        self._latest: tuple[int, _Epoch] | None = None

    def read(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at ``places`` of the stream, ascending from 0, numbered within the part."""
        found = np.empty_like(places)
        epochs, within = np.divmod(places, self._samples)
        for epoch in np.unique(epochs).tolist():
            begin, end = np.searchsorted(epochs, [epoch, epoch + 1])
            found[begin:end] = self._epoch(epoch).read(within[begin:end])
        return found

    def _epoch(self, number: int) -> _Epoch:
        if self._latest is None or self._latest[0] != number:
            order = Permutation(len(self._sizes), *self._key, number, _SHARDS)(np.arange(len(self._sizes)))
            self._latest = number, _Epoch.of(self._sizes[order], self._starts[order], key=(*self._key, number))
        return self._latest[1]


@attrs.frozen(kw_only=True, eq=False)
class _Epoch:
    """One epoch of a part.

    Args:
        starts: ``[shards]`` number of the first sample of each, in the order of the epoch.
        ends: ``[shards]`` how many samples there are up to the end of each.
        windows: ``[windows]`` how many samples there are up to the end of each.
        key: of this epoch's permutations.
    """

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    windows: NDArray[np.int64]
    key: tuple[int, ...]

    @classmethod
    def of(cls, sizes: NDArray[np.int64], starts: NDArray[np.int64], *, key: tuple[int, ...]) -> _Epoch:
        """Return an epoch of shards, cut into windows of about as many shards each."""
        ends = np.cumsum(sizes)
        count = -(-len(sizes) // WINDOW_SHARDS)
        last = np.arange(1, count + 1) * len(sizes) // count - 1
        return cls(starts=starts, ends=ends, windows=ends[last], key=key)

    def read(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at ``places`` of the epoch, ascending."""
        window = np.searchsorted(self.windows, places, side="right")
        mixed = np.empty_like(places)
        for number in np.unique(window).tolist():
            begin, end = np.searchsorted(window, [number, number + 1])
            first, stop = int(self.windows[number - 1]) if number else 0, int(self.windows[number])
            permutation = Permutation(stop - first, *self.key, number + 1)
            mixed[begin:end] = first + permutation(places[begin:end] - first)
        shard = np.searchsorted(self.ends, mixed, side="right")
        before = np.where(shard > 0, self.ends[shard - 1], 0)
        return self.starts[shard] + mixed - before
