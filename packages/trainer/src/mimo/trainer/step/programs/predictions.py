"""What the model predicts for held-out samples, put together from the ranks that hold shares of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from mimo.data import Packed
from mimo.topology.collectives import all_gather_single


@attrs.frozen(kw_only=True)
class Prediction:
    """What the model predicts for a held-out sample: at each label, the argmax given the true tokens before it.

    Labels of weight 0 are passed over.
    """

    sample: int
    ids: tuple[int, ...]
    right: bool


def gather_ids(ids: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> list[NDArray[np.int64]]:
    """Return the ids [t] of every rank of ``group``, of which there are as many as ``counts`` says."""
    if len(counts) == 1:
        return [ids.cpu().numpy()]
    padded = ids.new_zeros(max(counts))
    padded[: len(ids)] = ids
    found = padded.new_empty(len(counts) * len(padded))
    if len(padded):
        all_gather_single(found, padded, group)
    rows = found.cpu().numpy().reshape(len(counts), -1)
    return [row[:count] for row, count in zip(rows, counts, strict=True)]


def predictions_of(
    samples: Sequence[int], shares: Sequence[Packed], ids: Sequence[NDArray[np.int64]]
) -> Iterator[Prediction]:
    """Yield the prediction for each sample of a lane that has labels of a weight other than 0.

    Args:
        samples: of the lane.
        shares: each context rank's rows of them.
        ids: [T] of each, the argmax after each row.
    """
    number, position, label, target, predicted = (
        np.concatenate(found)
        for found in zip(
            *(
                (share.samples, share.positions, share.labels, share.targets, own)
                for share, own in zip(shares, ids, strict=True)
            ),
            strict=True,
        )
    )
    order = np.lexsort((position, number))
    order = order[target[order]]
    for index, sample in enumerate(samples):
        own = order[number[order] == index]
        if len(own):
            yield Prediction(
                sample=sample, ids=tuple(predicted[own].tolist()), right=bool((predicted[own] == label[own]).all())
            )
