"""What a dataset may have besides: where it comes from, what it is made of, and sizes known without reading."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from mimo.data.index.place import Origin
from mimo.data.index.sizes import ItemSize, SampleSize, SampleSizes
from mimo.data.index.store import IndexFileError
from mimo.data.index.tokens import SampleTokens, TokenArrays


class SupportsOrigin(Protocol):
    """A dataset of which an index can be kept."""

    def origin(self) -> Origin:
        """Return where the samples come from."""


class SupportsSources(Protocol):
    """A dataset that is made of others, each with an index of its own."""

    def sources(self) -> Sequence[tuple[str, Any]]:
        """Return name and dataset of each; samples are numbered one dataset after another."""


class SupportsSizes(Protocol):
    """A dataset that may know sizes without reading samples."""

    def sizes(self, samples: Sequence[int] | NDArray[np.int64]) -> SampleSizes | None:
        """Return the sizes of some samples in the order in which they are given; None where an index lacks.

        Raises:
            DataError: the index is damaged.
        """


def origin_of(dataset: Any) -> Origin | None:
    """Return where a dataset comes from, None where it doesn't say; see `SupportsOrigin`."""
    origin: Callable[[], Origin] | None = getattr(dataset, "origin", None)
    return None if origin is None else origin()


def sources_of(dataset: Any) -> Sequence[tuple[str, Any]]:
    """Return what a dataset is made of by name: itself, without a name, where it is of one; see `SupportsSources`."""
    sources: Callable[[], Sequence[tuple[str, Any]]] | None = getattr(dataset, "sources", None)
    return [("", dataset)] if sources is None else sources()


def sizes_of(dataset: Any, samples: Sequence[int] | NDArray[np.int64]) -> SampleSizes | None:
    """Return the sizes of some samples without reading them, None where these aren't known; see `SupportsSizes`."""
    sizes: Callable[[Any], SampleSizes | None] | None = getattr(dataset, "sizes", None)
    return None if sizes is None else sizes(samples)


@attrs.frozen(kw_only=True, eq=False)
class JoinedSizes:
    """The sizes of datasets whose samples are numbered one dataset after another, and ids where they are kept.

    Args:
        counts: samples of each.
        parts: sizes of each, None of one without an index.
        tokens: likewise ids; empty where no dataset has any.
    """

    counts: tuple[int, ...]
    parts: tuple[SampleSizes | None, ...]
    tokens: tuple[TokenArrays | None, ...] = ()
    _firsts: tuple[int, ...] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Count where each begins."""
        object.__setattr__(self, "_firsts", tuple(accumulate(self.counts, initial=0)))

    def of(self, sample: int) -> SampleSize | None:
        """Return one sample, None where its dataset has no index; `IndexFileError` as from `SampleSizes`."""
        part, number = self._part(sample)
        sizes = self.parts[part]
        return None if sizes is None else sizes[number]

    def items_of(self, sample: int) -> tuple[ItemSize, ...] | None:
        """Return the items of one sample, likewise."""
        part, number = self._part(sample)
        sizes = self.parts[part]
        return None if sizes is None else sizes.items_of(number)

    def tokens_of(self, sample: int) -> SampleTokens | None:
        """Return the ids of one sample, None where its dataset's aren't kept.

        Raises:
            IndexFileError: they are damaged, or are not those of which the sizes are known.
        """
        part, number = self._part(sample)
        tokens, sizes = self.tokens[part] if self.tokens else None, self.parts[part]
        if tokens is None or sizes is None:
            return None
        found = tokens[number]
        if len(found.ids) != sizes.ids[number]:
            msg = f"{len(found.ids)} ids of sample {number} are kept, and its sizes are those of {sizes.ids[number]}"
            raise IndexFileError(msg)
        return found

    def is_broken(self, sample: int) -> bool:
        """Tell whether a sample is known to be broken."""
        part, number = self._part(sample)
        sizes = self.parts[part]
        return sizes is not None and bool(sizes.broken[number])

    def _part(self, sample: int) -> tuple[int, int]:
        part = bisect_right(self._firsts, sample) - 1
        return part, sample - self._firsts[part]

    def take(self, samples: Sequence[int] | NDArray[np.int64]) -> SampleSizes | None:
        """Return some samples in the order given, None where one has no index; `IndexFileError` likewise."""
        chosen = np.asarray(samples, dtype=np.int64)
        owners = np.searchsorted(self._firsts, chosen, side="right") - 1
        order = np.argsort(owners, kind="stable")
        found = list[SampleSizes]()
        for part in np.unique(owners).tolist():
            sizes = self.parts[part]
            if sizes is None:
                return None
            found.append(sizes.take(chosen[owners == part] - self._firsts[part]))
        if not found:
            return SampleSizes.of((), ())
        if len(found) == 1:
            return found[0]
        return SampleSizes.joined(found).take(np.argsort(order, kind="stable"))
