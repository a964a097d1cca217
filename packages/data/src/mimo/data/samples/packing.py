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
    starts = np.cumsum([0, *lengths])
    total = int(starts[-1])
    # Each field is made for all rows of all samples; `place` then takes those of this context rank, and as padding the
    # one behind them all.
    here = np.arange(total) if context_size == 1 else _held(lengths, context_size, context_rank)
    place = np.full(-(-len(here) // multiple) * multiple, total, dtype=np.int64)
    place[: len(here)] = here
    owner = np.repeat(np.arange(len(layouts)), lengths)
    position = np.arange(total) - starts[owner]
    labels = np.concatenate([_NONE, *(layout.labels for layout in layouts)])
    next_labels = _next_labels(labels, owner, next_tokens)
    weights = _weights(layouts, next_labels, owner, position, place)
    targets = labels != NO_LABEL if weights is None else np.concatenate([layout.targets for layout in layouts])
    return Packed(
        tokens=_taken(np.concatenate([_NONE, *(layout.tokens for layout in layouts)]), place, padding=0),
        labels=_taken(labels, place, padding=NO_LABEL),
        positions=_taken(position, place, padding=0),
        grid_positions=_grid_positions(layouts, place),
        samples=_taken(owner, place, padding=len(layouts)),
        lengths=lengths,
        label_tokens=_counts(owner[targets], len(layouts)),
        placeholders=_placeholders(layouts, starts, total, None if context_size == 1 else here),
        next_labels=_taken(next_labels, place, padding=NO_LABEL),
        next_counts=tuple(_counts(owner[each != NO_LABEL], len(layouts)) for each in next_labels),
        items=tuple(_spans(layout) for layout in layouts) if with_items else (),
        weights=weights,
    )


def _held(lengths: Sequence[int], context_size: int, context_rank: int) -> NDArray[np.int64]:
    """Return which of all rows a context rank has of each sample."""
    found, first = [_NONE], 0
    for length in lengths:
        spans = context_spans(length, size=context_size, rank=context_rank)
        found += [np.arange(first + start, first + stop) for start, stop in spans]
        first += length
    return np.concatenate(found)


def _taken(rows: NDArray[np.int64], place: NDArray[np.int64], *, padding: int) -> NDArray[np.int64]:
    """Return the rows of the last axis at these places, of which the one behind all rows is padding."""
    return np.concatenate([rows, np.full((*rows.shape[:-1], 1), padding)], axis=-1)[..., place]


def _counts(owners: NDArray[np.int64], samples: int) -> tuple[int, ...]:
    """Return how many rows each sample has of those with these owners."""
    return tuple(np.bincount(owners, minlength=samples).tolist())


def _grid_positions(layouts: Sequence[SampleLayout], place: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return the places of rows in time, down and across; None where none lies in a grid."""
    grids = [layout.grid_positions for layout in layouts]
    if all(grid is None for grid in grids):
        return None
    own = [
        np.repeat(np.arange(len(layout.tokens))[:, None], 3, axis=1) if grid is None else grid
        for layout, grid in zip(layouts, grids, strict=True)
    ]
    return np.concatenate([*own, np.zeros((1, 3), dtype=np.int64)])[place]


def _placeholders(
    layouts: Sequence[SampleLayout], starts: NDArray[np.int64], total: int, here: NDArray[np.int64] | None
) -> dict[str, NDArray[np.int64]]:
    """Return by modality which of the rows that are here are of its items; None: all rows are here.

    Items and their runs ascend in a sample, and so do its rows here.
    """
    runs: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for first, layout in zip(starts.tolist(), layouts, strict=False):
        for item in layout.items:
            if item.runs:
                runs[item.info.modality] += [(first + start, first + stop) for start, stop in item.runs]
    found = {modality: _rows_of(own) for modality, own in runs.items()}
    if here is None:
        return found
    local = np.full(total, -1, dtype=np.int64)
    local[here] = np.arange(len(here))
    return {modality: held[held >= 0] for modality, held in ((name, local[rows]) for name, rows in found.items())}


def _rows_of(runs: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """Return the rows of runs, one after the other."""
    first, stop = np.array(runs, dtype=np.int64).T
    counts = stop - first
    before = np.cumsum(counts) - counts
    return np.repeat(first - before, counts) + np.arange(int(counts.sum()))


def _spans(layout: SampleLayout) -> tuple[tuple[int, int], ...]:
    """Return the rows of each item of a sample; text between them parts an item in several."""
    return tuple((start, stop) for item in layout.items for start, stop in item.runs if stop > start)


def _weights(
    layouts: Sequence[SampleLayout],
    next_labels: NDArray[np.int64],
    owner: NDArray[np.int64],
    position: NDArray[np.int64],
    place: NDArray[np.int64],
) -> TargetWeights | None:
    """Return the weights of packed rows; see `TargetWeights.of`."""
    if all(layout.weights is None for layout in layouts):
        return None
    return TargetWeights.of(
        [layout.targets.astype(np.float32) if layout.weights is None else layout.weights for layout in layouts],
        has_next=np.split(next_labels != NO_LABEL, np.cumsum([len(layout.tokens) for layout in layouts])[:-1], axis=1),
        owner=_taken(owner, place, padding=len(layouts)),
        position=_taken(position, place, padding=0),
    )


def _next_labels(labels: NDArray[np.int64], owner: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return [K, T] of the labels [T] of samples that lie one after the other."""
    found = np.full((count, len(labels)), NO_LABEL, dtype=np.int64)
    before = labels
    for k in range(1, count + 1):
        is_next = (before[:-k] != NO_LABEL) & (owner[:-k] == owner[k:])
        found[k - 1, :-k] = np.where(is_next, labels[k:], NO_LABEL)
        before = found[k - 1]
    return found
