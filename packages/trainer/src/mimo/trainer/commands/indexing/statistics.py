"""What an index says of a dataset as a whole, counted with a bounded number of samples in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs
import numpy as np
from numpy.typing import NDArray

from mimo.data import SampleSizes

_AT_ONCE = 1 << 20


@attrs.frozen(kw_only=True, eq=False)
class Distribution:
    """How often each number comes.

    Args:
        values: ``[V]``, ascending.
        counts: ``[V]`` of each, above 0.
    """

    values: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, pieces: Iterator[NDArray[np.int32]]) -> Distribution:
        """Return that of all numbers of pieces of an array."""
        found = cls(values=np.empty(0, dtype=np.int64), counts=np.empty(0, dtype=np.int64))
        for piece in pieces:
            values, counts = np.unique(piece, return_counts=True)
            every = np.concatenate([found.values, values])
            merged, places = np.unique(every, return_inverse=True)
            total = np.zeros(len(merged), dtype=np.int64)
            np.add.at(total, places, np.concatenate([found.counts, counts]))
            found = cls(values=merged, counts=total)
        return found

    @property
    def count(self) -> int:
        """How many numbers there are."""
        return int(self.counts.sum())

    @property
    def total(self) -> int:
        """Their sum."""
        return int(self.values @ self.counts)

    def percentile(self, percent: float) -> int:
        """Return the least of the numbers that at least so many percent are not above; at least one is needed."""
        place = np.searchsorted(np.cumsum(self.counts), percent / 100 * self.count, side="left")
        return int(self.values[min(int(place), len(self.values) - 1)])

    def pairs(self) -> list[tuple[int, int]]:
        """Return each number and how often it comes, the least number first."""
        return list(zip(self.values.tolist(), self.counts.tolist(), strict=True))

    def bins(self, most: int) -> Iterator[tuple[int, int, int]]:
        """Yield first number, last number and count of at most so many spans of equal width, from least to largest."""
        first, last = int(self.values[0]), int(self.values[-1])
        width = -(-(last - first + 1) // most)
        for begin in range(first, last + 1, width):
            inside = (self.values >= begin) & (self.values < begin + width)
            yield begin, min(begin + width - 1, last), int(self.counts[inside].sum())


@attrs.frozen(kw_only=True, eq=False)
class Items:
    """The items of one modality.

    Args:
        rows: of each, of those too that are cut off.
        cut: how many are cut off.
        kept_rows: rows of those that aren't.
    """

    rows: Distribution
    cut: int
    kept_rows: int


@attrs.frozen(kw_only=True, eq=False)
class Statistics:
    """What samples are.

    Args:
        samples: how many, broken ones among them.
        broken: of these.
        cut: samples that are longer than a run takes.
        tokens: rows of each that is not broken.
        targets: rows that are learnt, of all.
        weight: sum of their weights.
        items: by modality, without those that there are none of.
    """

    samples: int
    broken: int
    cut: int
    tokens: Distribution
    targets: int
    weight: float
    items: Mapping[str, Items]

    @classmethod
    def of(cls, sizes: SampleSizes) -> Statistics:
        """Return those of all samples."""
        spans = _spans(len(sizes))
        sound = (np.asarray(sizes.tokens[span])[np.asarray(sizes.broken[span]) == 0] for span in spans)
        items = {name: _items(sizes, number) for number, name in enumerate(sizes.modalities)}
        return cls(
            samples=len(sizes),
            broken=sum(int(np.count_nonzero(sizes.broken[span])) for span in spans),
            cut=sum(int(np.count_nonzero(sizes.cut[span])) for span in spans),
            tokens=Distribution.of(sound),
            targets=sum(int(sizes.targets[span].sum(dtype=np.int64)) for span in spans),
            weight=float(sum(float(sizes.weight[span].sum()) for span in spans)),
            items={name: each for name, each in items.items() if each.rows.count},
        )

    def distributions(self) -> dict[str, Distribution]:
        """Return what is counted, by a name of it: tokens of samples, and rows of items by modality; none empty."""
        shown = {"tokens of a sample": self.tokens}
        shown |= {f"rows of an item, {name}": items.rows for name, items in self.items.items()}
        return {name: each for name, each in shown.items() if each.count}


def _items(sizes: SampleSizes, modality: int) -> Items:
    spans = _spans(len(sizes.modality))
    cut = kept_rows = 0
    for span in spans:
        own, kept = sizes.modality[span] == modality, sizes.kept[span] != 0
        cut += int(np.count_nonzero(own & ~kept))
        kept_rows += int(sizes.rows[span][own & kept].sum(dtype=np.int64))
    rows = Distribution.of(np.asarray(sizes.rows[span])[sizes.modality[span] == modality] for span in spans)
    return Items(rows=rows, cut=cut, kept_rows=kept_rows)


def _spans(length: int) -> list[slice]:
    return [slice(begin, begin + _AT_ONCE) for begin in range(0, length, _AT_ONCE)]
