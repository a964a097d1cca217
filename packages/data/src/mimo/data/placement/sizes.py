"""What a placement follows from, and what it says: plain numbers, the same on every rank.

N samples of a step, I items of an encoder in it, sample by sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import ArrayLike, NDArray

from mimo.topology import Ownership

MAX_COST = 1 << 30
"""What the costliest thing of a step costs, so that sums over a step stay far below 2^63."""


@attrs.frozen(kw_only=True, eq=False)
class Loads:
    """What one module has to do in a step.

    Args:
        costs: ``[N]`` of the language model, ``[I]`` of an encoder; whole numbers from 0 to `MAX_COST` in a unit that
            all modules of the step share.
        rows: of each likewise, what a lane holds of it.
        lanes: of the module.
        stages: pipeline ranks of the module, each of which does its part of the cost.
        passes: the microbatches that each pass serves, ascending; together all of the step, each once.
    """

    costs: NDArray[np.int64]
    rows: NDArray[np.int64]
    lanes: int
    stages: int
    passes: tuple[tuple[int, ...], ...]


@attrs.frozen(kw_only=True, eq=False)
class EncoderLoads(Loads):
    """What an encoder has to do in a step.

    Args:
        samples: ``[I]`` the sample of each item, ascending.
        homes: for each language lane the lanes of the encoder from which its rows need not travel; none where the two
            share no rank.
    """

    samples: NDArray[np.int64]
    homes: tuple[tuple[int, ...], ...]


@attrs.frozen(kw_only=True)
class PlacedMicrobatch:
    """Who does what of one microbatch.

    Args:
        samples: positions in the step, in the order of the microbatch.
        owners: the language lane of each of them.
        items: for each encoder the lane of each of its items in these samples, in order.
    """

    samples: tuple[int, ...]
    owners: Ownership
    items: tuple[Ownership, ...]


def in_whole_numbers(costs: Sequence[ArrayLike]) -> list[NDArray[np.int64]]:
    """Return costs of several modules in whole numbers of one unit; of what costs anything, at least 1."""
    arrays = [np.asarray(found, dtype=np.float64) for found in costs]
    most = max((float(found.max(initial=0.0)) for found in arrays), default=0.0)
    scale = MAX_COST / most if most > 0 else 0.0
    return [np.where(found > 0, np.maximum(np.rint(found * scale), 1), 0).astype(np.int64) for found in arrays]
