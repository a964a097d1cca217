"""Weights of a mixture as whole numbers: how many of so many samples are taken from each part, exactly."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import attrs
import numpy as np
from numpy.typing import NDArray

from mimo.data.order.permutation import Permutation
from mimo.hooks import ConfigError

_PERIODS = (1 << 16, 1 << 18, 1 << 20)
"""Samples over which weights are kept exactly: the first of these in which each part has its fair number of samples."""
_FAIR = 16
"""With as many samples of a period, what rounding adds or takes away is a thirtieth at most."""


@attrs.frozen(kw_only=True)
class Shares:
    """How many samples of each period are taken from each part.

    Args:
        counts: by part, each 1 or more.
    """

    counts: tuple[int, ...]

    @classmethod
    def of(cls, weights: Mapping[str, float]) -> Shares:
        """Return the shares of weights, rounded by largest remainder, where remainders are equal the first part's.

        Args:
            weights: by part, each finite and above 0.

        Raises:
            ConfigError: one is so small that no sample would be taken from its part.
        """
        exact = [Fraction(weight) for weight in weights.values()]
        total = sum(exact)
        period = next((each for each in _PERIODS if min(exact) * each >= _FAIR * total), _PERIODS[-1])
        ideal = [weight * period / total for weight in exact]
        counts = [int(share) for share in ideal]
        by_remainder = sorted(range(len(ideal)), key=lambda part: counts[part] - ideal[part])
        for part in by_remainder[: period - sum(counts)]:
            counts[part] += 1
        for name, count in zip(weights, counts, strict=True):
            if not count:
                raise ConfigError(
                    "data",
                    expected=f"weights of which none is less than 1/{period} of their sum",
                    got=f"{weights[name]:g} of {float(total):g} for {name}",
                    fix="Raise it, or leave the source out.",
                )
        return cls(counts=tuple(counts))

    @property
    def period(self) -> int:
        """Samples after which each part has been taken from as often as its count says."""
        return sum(self.counts)

    def parts(self, *key: int) -> NDArray[np.uint32]:
        """Return ``[period]`` from which part each sample of a period is taken, in an order that follows from a key."""
        slots = Permutation(self.period, *key)(np.arange(self.period))
        return np.searchsorted(np.cumsum(self.counts), slots, side="right").astype(np.uint32)
