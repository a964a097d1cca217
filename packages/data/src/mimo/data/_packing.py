"""Samples laid end to end: the one form of a microbatch.

T packed tokens of all samples, padding at the end included; S tokens of one sample; R placeholder rows of a modality.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from mimo.data._layout import NO_LABEL, SampleLayout


@attrs.frozen(kw_only=True, eq=False)
class Packed:
    """A microbatch of samples.

    Args:
        tokens: ids ``[T]``; 0 in the padding.
        labels: ``[T]``; `NO_LABEL` in the padding.
        positions: ``[T]``; from 0 in each sample, 0 in the padding.
        lengths: tokens of each sample, the padding left out.
        placeholders: for each modality that occurs, the positions in T ``[R]`` of its rows: sample by sample, in a
            sample item by item, which is the order in which its encoder returns them.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    positions: NDArray[np.int64]
    lengths: tuple[int, ...]
    placeholders: Mapping[str, NDArray[np.int64]]


def pack(layouts: Sequence[SampleLayout], *, multiple: int = 1) -> Packed:
    """Return the samples end to end, padded at the end so that T is a multiple of ``multiple``; none is legal.

    Raises:
        ValueError: ``multiple`` is less than 1.
    """
    if multiple < 1:
        msg = f"multiple: expected at least 1, got {multiple}"
        raise ValueError(msg)
    lengths = tuple(len(layout.tokens) for layout in layouts)
    padded = -(-sum(lengths) // multiple) * multiple
    tokens = np.zeros(padded, dtype=np.int64)
    labels = np.full(padded, NO_LABEL, dtype=np.int64)
    positions = np.zeros(padded, dtype=np.int64)
    runs: defaultdict[str, list[NDArray[np.int64]]] = defaultdict(list)
    start = 0
    for layout, length in zip(layouts, lengths, strict=True):
        inside = slice(start, start + length)
        tokens[inside] = layout.tokens
        labels[inside] = layout.labels
        positions[inside] = np.arange(length)
        for item in layout.items:
            first = start + item.start
            runs[item.info.modality].append(np.arange(first, first + item.rows, dtype=np.int64))
        start += length
    return Packed(
        tokens=tokens,
        labels=labels,
        positions=positions,
        lengths=lengths,
        placeholders={modality: np.concatenate(found) for modality, found in runs.items()},
    )
