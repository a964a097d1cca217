"""How much each token counts that is predicted: read from a dataset, laid out by sample, packed by microbatch.

S tokens of one sample; T packed tokens; K labels further on.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from mimo.data.samples.specs import Dataset, weights_of
from mimo.hooks import DataError

MAX_WEIGHT = float(np.finfo(np.float32).max)
"""The largest weight of a token."""


@attrs.frozen(kw_only=True, eq=False)
class TargetWeights:
    """The weights of a microbatch's labels, as one context rank holds them, in float32.

    Args:
        rows: ``[T]``, of the label of each row; 0 where there is none.
        sums: over each sample, rows of other context ranks included.
        next_rows: ``[K, T]``, of the labels further on.
        next_sums: over each sample likewise, for each of the K.
    """

    rows: NDArray[np.float32]
    sums: tuple[float, ...]
    next_rows: NDArray[np.float32]
    next_sums: tuple[tuple[float, ...], ...]

    @classmethod
    def of(
        cls,
        samples: Sequence[NDArray[np.float32]],
        *,
        has_next: Sequence[NDArray[np.bool_]],
        owner: NDArray[np.int64],
        position: NDArray[np.int64],
    ) -> TargetWeights:
        """Pack the weights of whole samples.

        Args:
            samples: ``[S]`` of each.
            has_next: ``[K, S]`` of each, where a label further on is to be predicted.
            owner: ``[T]`` number of each row's sample; ``len(samples)`` in the padding.
            position: ``[T]`` of each row in its sample.
        """
        later = [_next_weights(weights, where) for weights, where in zip(samples, has_next, strict=True)]
        starts = np.cumsum([0, *map(len, samples)])
        place = np.where(owner < len(samples), starts[owner] + position, starts[-1])  # the padding has the last one
        depth = len(has_next[0])
        return cls(
            rows=np.concatenate([*samples, np.zeros(1, dtype=np.float32)])[place],
            sums=tuple(map(_sum, samples)),
            next_rows=np.concatenate([*later, np.zeros((depth, 1), dtype=np.float32)], axis=1)[:, place],
            next_sums=tuple(tuple(_sum(weights[k]) for weights in later) for k in range(depth)),
        )


def read_weights(dataset: Dataset, sample: int, ids: int) -> NDArray[np.float32] | None:
    """Return the weight of predicting each of the ``ids`` tokens of a sample; None where each is 1.

    Raises:
        DataError: there are more or fewer weights than tokens, or one is negative, no number or infinite.
    """
    given = weights_of(dataset, sample)
    if given is None:
        return None
    weights = np.asarray(given, dtype=np.float64)
    if weights.shape != (ids,):
        raise DataError(
            dataset.where(sample),
            expected=f"one weight for each of its {ids} tokens",
            got=f"{len(weights)} weights" if weights.ndim == 1 else f"weights of shape {weights.shape}",
        )
    wrong = np.flatnonzero(~((weights >= 0) & (weights <= MAX_WEIGHT)))
    if len(wrong):
        raise DataError(
            dataset.where(sample),
            expected=f"weights of tokens from 0 to {MAX_WEIGHT:.2g}",
            got=f"{weights[wrong[0]]} for token {wrong[0]}",
            fix="Give what is not to be learned the weight 0.",
        )
    return weights.astype(np.float32)


def _next_weights(weights: NDArray[np.float32], where: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return [K, S] of the weights [S] of one sample's labels, each that of the label k + 1 rows later."""
    found = np.zeros(where.shape, dtype=np.float32)
    for k, row in enumerate(found, start=1):
        later = weights[k:]
        row[: len(later)] = np.where(where[k - 1, : len(later)], later, 0)
    return found


def _sum(weights: NDArray[np.float32]) -> float:
    return float(weights.sum(dtype=np.float64))
