"""Where an edge's rows lie at the language model: with the tokens whose places they take, cut over its ranks.

Known for every lane on every rank, from the layouts of the samples alone. K pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from mimo.data import SampleLayout
from mimo.schedule import Cut


@attrs.frozen(eq=False)
class TokenCut:
    """A language lane's tokens cut over its cells, tokens ``bounds[i] .. bounds[i + 1]`` in ``cells[i]``.

    Args:
        bounds: ``[K + 1]``, ascending.
        cells: ``[K]``, context ranks, or under sequence parallelism each tensor rank of each.
    """

    bounds: NDArray[np.int64]
    cells: NDArray[np.int64]

    @classmethod
    def of(cls, lengths: Sequence[int], *, context: int, slices: int, multiple: int = 1) -> TokenCut:
        """Cut samples as `mimo.data.pack` packs them: the same chunks, the same padding at a context rank's end.

        Args:
            lengths: tokens of each sample of the lane.
            context: number of context ranks.
            slices: into how many equal ones each context rank's tokens are cut, its padding included.
            multiple: to one of it each slice is padded.
        """
        share, more = np.divmod(np.array(lengths, dtype=np.int64)[:, None], 2 * context)
        chunk = np.arange(2 * context)
        sizes = share + (chunk < more)  # [samples, chunks], as `mimo.topology.context_spans` cuts
        holder = np.broadcast_to(np.minimum(chunk, chunk[::-1]), sizes.shape).ravel()
        starts = np.concatenate([[0], np.cumsum(sizes)])
        if slices == 1:
            return cls(starts, holder)
        # Where a chunk begins among the tokens of its context rank, which has an early and a late one of each sample.
        pairs = np.stack([sizes[:, :context], sizes[:, : context - 1 : -1]], axis=1)
        ends = np.cumsum(pairs.reshape(-1, context), axis=0).reshape(pairs.shape)
        early, late = np.moveaxis(ends - pairs, 1, 0)
        places = np.concatenate([early, late[:, ::-1]], axis=1).ravel()
        each = np.maximum(-(-pairs.sum(axis=(0, 1)) // (slices * multiple)) * multiple, 1)[holder]
        # A chunk that reaches over several slices becomes as many pieces.
        sizes = sizes.ravel()
        first = places // each
        pieces = np.where(sizes > 0, (places + sizes - 1) // each - first + 1, 0)
        number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        slice_of = np.repeat(first, pieces) + number
        before = np.maximum(slice_of * np.repeat(each, pieces) - np.repeat(places, pieces), 0)
        bounds = np.repeat(starts[:-1], pieces) + before
        return cls(np.append(bounds, starts[-1]), np.repeat(holder, pieces) * slices + slice_of)

    def rows(self, layouts: Sequence[SampleLayout], modality: str) -> Cut:
        """Return how a modality's rows in the same samples lie, each with the token whose place it takes."""
        starts, rows, first = [-1], [0], 0
        for layout in layouts:
            for item in layout.items:
                if item.runs and item.info.modality == modality:
                    starts += [first + start for start, _ in item.runs]
                    rows += [stop - start for start, stop in item.runs]
            first += len(layout.tokens)
        at = np.searchsorted(starts, self.bounds, side="right") - 1
        inside = np.minimum(self.bounds - np.array(starts)[at], np.array(rows)[at])
        return self._of((np.cumsum(rows) - rows)[at] + inside)

    def chosen(self, rows: Sequence[NDArray[np.bool_]]) -> Cut:
        """Return how some rows of the same samples lie, ``[S]`` of each sample whether it is one, with their tokens."""
        own = np.concatenate([np.zeros(0, dtype=np.bool_), *rows])
        return self._of(np.searchsorted(np.flatnonzero(own), self.bounds))

    def _of(self, bounds: NDArray[np.int64]) -> Cut:
        """Return rows cut where these are the first of each piece, without empty pieces."""
        filled = bounds[1:] > bounds[:-1]
        return Cut([0, *bounds[1:][filled].tolist()], self.cells[filled].tolist())
