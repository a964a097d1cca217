"""Samples laid end to end: the one form of a microbatch, cut over context ranks where there are several.

T packed tokens of all samples, padding at the end included; S tokens of one sample; R placeholder rows of a modality.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from mimo.data.samples.layout import NO_LABEL, SampleLayout
from mimo.data.samples.weights import TargetWeights
from mimo.topology import context_spans


@attrs.frozen(kw_only=True, eq=False)
class Packed:
    """A microbatch of samples, as one context rank holds it.

    Args:
        tokens: ids ``[T]``; 0 in the padding.
        labels: ``[T]``; `NO_LABEL` in the padding.
        positions: ``[T]``; from 0 in each sample, 0 in the padding.
        grid_positions: ``[T, 3]`` places in time, down and across, as `mimo.data.SampleLayout` has them, 0 in the
            padding; None where no row lies in a grid, so that each is its position.
        samples: ``[T]`` number of each row's sample; ``len(lengths)`` in the padding.
        lengths: tokens of each sample, those on other context ranks included, the padding left out.
        label_tokens: label tokens of each sample whose weight is not 0, likewise.
        placeholders: for each modality that occurs, the positions in T ``[R]`` of its rows: sample by sample, in a
            sample item by item, which is the order in which its encoder returns them.
        next_labels: ``[K, T]``, of the k-th row the label k + 1 tokens later of each row that has a label, and so have
            all tokens between in its sample; else `NO_LABEL`.
        next_counts: how many of each sample's are labels, for each of the K, those on other context ranks included.
        items: of each sample, the rows ``start`` .. ``stop`` in it of each of its items that has some, those on other
            context ranks included; an item with text between its rows is several. Nothing if it was not asked for.
        weights: of the labels; None where no sample has any, so that each is 1.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    positions: NDArray[np.int64]
    grid_positions: NDArray[np.int64] | None
    samples: NDArray[np.int64]
    lengths: tuple[int, ...]
    label_tokens: tuple[int, ...]
    placeholders: Mapping[str, NDArray[np.int64]]
    next_labels: NDArray[np.int64]
    next_counts: tuple[tuple[int, ...], ...]
    items: tuple[tuple[tuple[int, int], ...], ...] = ()
    weights: TargetWeights | None = None

    @property
    def targets(self) -> NDArray[np.bool_]:
        """Tell of each row ``[T]`` whether it is learned from: whether it has a label whose weight is not 0."""
        return self.labels != NO_LABEL if self.weights is None else self.weights.rows > 0

    @property
    def label_weight(self) -> float:
        """The sum of the weights of these rows' labels."""
        return float(
            np.count_nonzero(self.targets) if self.weights is None else self.weights.rows.sum(dtype=np.float64)
        )


_NONE = np.empty(0, dtype=np.int64)


def pack(
    layouts: Sequence[SampleLayout],
    *,
    multiple: int = 1,
    context_size: int = 1,
    context_rank: int = 0,
    next_tokens: int = 0,
    with_items: bool = False,
) -> Packed:
    """Return the samples end to end; none is legal.

    Args:
        layouts: of the samples, in order.
        multiple: T is padded at the end to a multiple of it.
        context_size: context ranks over which each sample is cut, as `mimo.topology.context_spans` says.
        context_rank: the one of them whose rows to return.
        next_tokens: K, how many labels further on to return.
        with_items: whether to return which rows are one item's.

    Raises:
        ValueError: ``multiple`` is less than 1.
    """
    if multiple < 1:
        msg = f"multiple: expected at least 1, got {multiple}"
        raise ValueError(msg)
    lengths = tuple(len(layout.tokens) for layout in layouts)
    spans = [context_spans(length, size=context_size, rank=context_rank) for length in lengths]
    used = sum(stop - start for each in spans for start, stop in each)
    padded = -(-used // multiple) * multiple
    tokens = np.zeros(padded, dtype=np.int64)
    labels = np.full(padded, NO_LABEL, dtype=np.int64)
    positions = np.zeros(padded, dtype=np.int64)
    grids = [layout.grid_positions for layout in layouts]
    places = None if all(each is None for each in grids) else np.zeros((padded, 3), dtype=np.int64)
    samples = np.full(padded, len(layouts), dtype=np.int64)
    further = [_next_labels(layout.labels, next_tokens) for layout in layouts]
    next_labels = np.full((next_tokens, padded), NO_LABEL, dtype=np.int64)
    runs: defaultdict[str, list[NDArray[np.int64]]] = defaultdict(list)
    first = 0
    for number, (layout, each, grid) in enumerate(zip(layouts, spans, grids, strict=True)):
        found = {item.info.modality: runs[item.info.modality] for item in layout.items if item.runs}
        for start, stop in each:
            inside = slice(first, first + stop - start)
            tokens[inside] = layout.tokens[start:stop]
            labels[inside] = layout.labels[start:stop]
            next_labels[:, inside] = further[number][:, start:stop]
            positions[inside] = np.arange(start, stop)
            if places is not None:
                places[inside] = positions[inside, None] if grid is None else grid[start:stop]
            samples[inside] = number
            for item in layout.items:
                for begin, end in item.runs:
                    low, high = max(begin, start), min(end, stop)
                    found[item.info.modality].append(np.arange(low, max(low, high), dtype=np.int64) + (first - start))
            first += stop - start
    return Packed(
        tokens=tokens,
        labels=labels,
        positions=positions,
        grid_positions=places,
        samples=samples,
        lengths=lengths,
        label_tokens=tuple(int(np.count_nonzero(layout.targets)) for layout in layouts),
        placeholders={modality: np.concatenate([_NONE, *each]) for modality, each in runs.items()},
        next_labels=next_labels,
        next_counts=tuple(
            tuple(int(np.count_nonzero(each[k] != NO_LABEL)) for each in further) for k in range(next_tokens)
        ),
        items=tuple(_spans(layout) for layout in layouts) if with_items else (),
        weights=_weights(layouts, further, samples, positions),
    )


def _spans(layout: SampleLayout) -> tuple[tuple[int, int], ...]:
    """Return the rows of each item of a sample; text between them parts an item in several."""
    return tuple((start, stop) for item in layout.items for start, stop in item.runs if stop > start)


def _weights(
    layouts: Sequence[SampleLayout],
    further: Sequence[NDArray[np.int64]],
    owner: NDArray[np.int64],
    position: NDArray[np.int64],
) -> TargetWeights | None:
    """Return the weights of packed rows; see `TargetWeights.of`."""
    if all(layout.weights is None for layout in layouts):
        return None
    return TargetWeights.of(
        [layout.targets.astype(np.float32) if layout.weights is None else layout.weights for layout in layouts],
        has_next=[each != NO_LABEL for each in further],
        owner=owner,
        position=position,
    )


def _next_labels(labels: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return [K, S] of the labels [S] of one sample."""
    found = np.full((count, len(labels)), NO_LABEL, dtype=np.int64)
    before = labels
    for k in range(1, count + 1):
        later = labels[k:]
        found[k - 1, : len(later)] = np.where(before[: len(later)] == NO_LABEL, NO_LABEL, later)
        before = found[k - 1]
    return found
