"""What an index says of a dataset as a whole, counted with a bounded number of samples in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

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
    """The items of one modality that encoders read.

    Args:
        rows: of each, of those too that are cut off.
        cut: how many are cut off.
        kept_rows: rows of those that aren't.
    """

    rows: Distribution
    cut: int
    kept_rows: int


@attrs.frozen(kw_only=True, eq=False)
class MadeItems:
    """The items of one modality that a generator makes.

    Args:
        made_from: from how many rows of the language model each is made that isn't cut off.
        losses: of each, of those too that are cut off.
        cut: how many are cut off.
        asked: rows of the placeholders of those that aren't.
    """

    made_from: Distribution
    losses: Distribution
    cut: int
    asked: int


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
        items: that are read, by modality, without those that there are none of.
        made: likewise, that are made.
    """

    samples: int
    broken: int
    cut: int
    tokens: Distribution
    targets: int
    weight: float
    items: Mapping[str, Items]
    made: Mapping[str, MadeItems]

    @classmethod
    def of(cls, sizes: SampleSizes) -> Statistics:
        """Return those of all samples."""
        spans = _spans(len(sizes))
        sound = (np.asarray(sizes.tokens[span])[np.asarray(sizes.broken[span]) == 0] for span in spans)
        items = {name: _items(sizes, number) for number, name in enumerate(sizes.modalities)}
        made = {name: _made(sizes, number) for number, name in enumerate(sizes.modalities)}
        return cls(
            samples=len(sizes),
            broken=sum(int(np.count_nonzero(sizes.broken[span])) for span in spans),
            cut=sum(int(np.count_nonzero(sizes.cut[span])) for span in spans),
            tokens=Distribution.of(sound),
            targets=sum(int(sizes.targets[span].sum(dtype=np.int64)) for span in spans),
            weight=float(sum(float(sizes.weight[span].sum()) for span in spans)),
            items={name: each for name, each in items.items() if each.rows.count},
            made={name: each for name, each in made.items() if each.losses.count},
        )

    def distributions(self) -> dict[str, Distribution]:
        """Return what is counted, by a name of it, none empty.

        Tokens of samples; by modality rows of the items that are read, losses of those that are made, and from how many
        rows these are made.
        """
        shown = {"tokens of a sample": self.tokens}
        shown |= {f"rows of an item, {name}": items.rows for name, items in self.items.items()}
        for name, made in self.made.items():
            shown[f"rows that an item is made from, {name}"] = made.made_from
            shown[f"losses of an item that is made, {name}"] = made.losses
        return {name: each for name, each in shown.items() if each.count}


def _items(sizes: SampleSizes, modality: int) -> Items:
    found = _Modality(sizes=sizes, modality=modality, is_used=sizes.is_read)
    cut, rows = found.cut_and_kept(sizes.rows)
    return Items(rows=found.distribution(sizes.rows), cut=cut, kept_rows=rows)


def _made(sizes: SampleSizes, modality: int) -> MadeItems:
    found = _Modality(sizes=sizes, modality=modality, is_used=sizes.is_made)
    cut, rows = found.cut_and_kept(sizes.asked)
    return MadeItems(
        made_from=found.distribution(sizes.made_from, kept=True),
        losses=found.distribution(sizes.losses),
        cut=cut,
        asked=rows,
    )


@attrs.frozen(kw_only=True, eq=False)
class _Modality:
    """The items of a modality that are used in one way.

    Args:
        sizes: of all samples.
        modality: its number.
        is_used: returns for each item of a span whether it is used so.
    """

    sizes: SampleSizes
    modality: int
    is_used: Callable[[slice], NDArray[np.bool_]]

    def distribution(self, values: NDArray[np.int32], *, kept: bool = False) -> Distribution:
        """Return that of values of items ``[M]``, of all of these, or only of those that aren't cut off."""
        return Distribution.of(
            np.asarray(values[span])[own & (self.sizes.kept[span] != 0) if kept else own] for span, own in self._own()
        )

    def cut_and_kept(self, values: NDArray[np.int32]) -> tuple[int, int]:
        """Return how many of these items are cut off, and the sum of values ``[M]`` of the others."""
        cut = total = 0
        for span, own in self._own():
            kept = self.sizes.kept[span] != 0
            cut += int(np.count_nonzero(own & ~kept))
            total += int(values[span][own & kept].sum(dtype=np.int64))
        return cut, total

    def _own(self) -> Iterator[tuple[slice, NDArray[np.bool_]]]:
        for span in _spans(len(self.sizes.modality)):
            yield span, (self.sizes.modality[span] == self.modality) & self.is_used(span)


def _spans(length: int) -> list[slice]:
    return [slice(begin, begin + _AT_ONCE) for begin in range(0, length, _AT_ONCE)]
