"""Order of version 1, which runs saved before there were others keep: a sorted list of random bits for each epoch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class FirstOrder:
    """All samples as one part, each epoch a permutation held in memory; must stay as it is to the bit.

    Args:
        samples: number of samples in the dataset.
        seed: 0 or more.
    """

    def __init__(self, samples: int, seed: int) -> None:
        self._samples = samples
        self._seed = seed
        # Only saves work: steps usually ask for the same epoch again. What it holds never shows in a result.
        self._latest: tuple[int, NDArray[np.intp]] | None = None

    def read(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the samples at ``count`` positions of the stream of epochs, from position ``first`` on."""
        found = np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            epoch, offset = divmod(first + done, self._samples)
            piece = self._permutation(epoch)[offset : offset + count - done]
            found[done : done + len(piece)] = piece
            done += len(piece)
        return found

    def _permutation(self, epoch: int) -> NDArray[np.intp]:
        """Return the permutation of one epoch.

        Made from the raw bits of Philox, whose stream numpy promises to keep, unlike that of ``Generator`` methods.
        """
        if self._latest is None or self._latest[0] != epoch:
            bits = np.random.Philox(np.random.SeedSequence([self._seed, epoch])).random_raw(self._samples)
            self._latest = (epoch, np.argsort(bits, kind="stable"))
        return self._latest[1]
