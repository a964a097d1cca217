"""Which samples a step reads: a function of (seed, step) alone, so that resuming needs no state of its own."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class StepSampler:
    """Names the samples of each step: every epoch in a new order, epochs joined without a gap.

    Args:
        samples: number of samples in the dataset.
        global_batch: samples of one step, over all lanes and microbatches; may exceed ``samples``.
        seed: 0 or more.

    Raises:
        ValueError: one of them is out of range.
    """

    def __init__(self, samples: int, global_batch: int, seed: int) -> None:
        for name, value, least in (("samples", samples, 1), ("global_batch", global_batch, 1), ("seed", seed, 0)):
            if value < least:
                msg = f"{name}: expected at least {least}, got {value}"
                raise ValueError(msg)
        self._samples = samples
        self._global_batch = global_batch
        self._seed = seed
        # Only saves work: steps usually ask for the same epoch again. What it holds never shows in a result.
        self._latest: tuple[int, NDArray[np.intp]] | None = None

    def samples(self, step: int) -> tuple[int, ...]:
        """Return the samples of ``step`` (counted from 1), in order.

        Raises:
            ValueError: ``step`` is less than 1.
        """
        if step < 1:
            msg = f"step: expected at least 1, got {step}"
            raise ValueError(msg)
        first = (step - 1) * self._global_batch
        named: list[int] = []
        while len(named) < self._global_batch:
            epoch, offset = divmod(first + len(named), self._samples)
            wanted = self._global_batch - len(named)
            named += self._order(epoch)[offset : offset + wanted].tolist()
        return tuple(named)

    def _order(self, epoch: int) -> NDArray[np.intp]:
        """Return the permutation of one epoch.

        Made from the raw bits of Philox, whose stream numpy promises to keep, unlike that of ``Generator`` methods.
        """
        if self._latest is None or self._latest[0] != epoch:
            bits = np.random.Philox(np.random.SeedSequence([self._seed, epoch])).random_raw(self._samples)
            self._latest = (epoch, np.argsort(bits, kind="stable"))
        return self._latest[1]
