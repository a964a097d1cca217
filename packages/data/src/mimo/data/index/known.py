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
class DatasetIndex:
    """What the index of one dataset says.

    Args:
        sizes: of its samples.
        tokens: their ids; None where they aren't kept.
    """

    sizes: SampleSizes
    tokens: TokenArrays | None = None

    def tokens_of(self, sample: int) -> SampleTokens | None:
        """Return the ids of one sample, None where they aren't kept.

        Raises:
            IndexFileError: they are damaged, or are not those of which the sizes are known.
        """
        if self.tokens is None:
            return None
        found = self.tokens[sample]
        if len(found.ids) != self.sizes.ids[sample]:
            msg = (
                f"{len(found.ids)} ids of sample {sample} are kept, and its sizes are those of {self.sizes.ids[sample]}"
            )
            raise IndexFileError(msg)
        return found


@attrs.frozen(kw_only=True, eq=False)
class JoinedIndex:
    """The indexes of datasets whose samples are numbered one dataset after another.

    Args:
        counts: samples of each.
        parts: the index of each, None of one without.
    """

    counts: tuple[int, ...]
    parts: tuple[DatasetIndex | None, ...]
    _firsts: tuple[int, ...] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Count where each begins."""
        object.__setattr__(self, "_firsts", tuple(accumulate(self.counts, initial=0)))

    @property
    def keeps_tokens(self) -> bool:
        """Whether the ids of any dataset are kept."""
        return any(part is not None and part.tokens is not None for part in self.parts)

    def of(self, sample: int) -> SampleSize | None:
        """Return one sample, None where its dataset has no index; `IndexFileError` as from `SampleSizes`."""
        part, number = self._part(sample)
        return None if part is None else part.sizes[number]

    def items_of(self, sample: int) -> tuple[ItemSize, ...] | None:
        """Return the items of one sample, likewise."""
        part, number = self._part(sample)
        return None if part is None else part.sizes.items_of(number)

    def tokens_of(self, sample: int) -> SampleTokens | None:
        """Return the ids of one sample, None where its dataset's aren't kept; `DatasetIndex.tokens_of` says more."""
        part, number = self._part(sample)
        return None if part is None else part.tokens_of(number)

    def is_broken(self, sample: int) -> bool:
        """Tell whether a sample is known to be broken."""
        part, number = self._part(sample)
        return part is not None and bool(part.sizes.broken[number])

    def _part(self, sample: int) -> tuple[DatasetIndex | None, int]:
        """Return the index of a sample's dataset, and its number there."""
        part = bisect_right(self._firsts, sample) - 1
        return self.parts[part], sample - self._firsts[part]

    def take(self, samples: Sequence[int] | NDArray[np.int64]) -> SampleSizes | None:
        """Return some samples in the order given, None where one has no index; `IndexFileError` likewise."""
        chosen = np.asarray(samples, dtype=np.int64)
        owners = np.searchsorted(self._firsts, chosen, side="right") - 1
        order = np.argsort(owners, kind="stable")
        found = list[SampleSizes]()
        for owner in np.unique(owners).tolist():
            part = self.parts[owner]
            if part is None:
                return None
            found.append(part.sizes.take(chosen[owners == owner] - self._firsts[owner]))
        if not found:
            return SampleSizes.of((), ())
        if len(found) == 1:
            return found[0]
        return SampleSizes.joined(found).take(np.argsort(order, kind="stable"))
