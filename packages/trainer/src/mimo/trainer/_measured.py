"""A dataset whose items all have sizes: where it tells none, the encoder of the modality measures the raw item."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import attrs

from mimo.data import Dataset
from mimo.hooks import DataError, ItemInfo, UserError
from mimo.model import EncoderSpec

_CACHED_SAMPLES = 256
"""A step asks for the same few samples several times."""


class MeasuredDataset:
    """A dataset, with the sizes that it leaves to encoders.

    Args:
        inner: the dataset.
        encoders: by modality.
    """

    def __init__(self, inner: Dataset, encoders: Mapping[str, EncoderSpec]) -> None:
        self._inner = inner
        self._encoders = encoders
        self._infos = lru_cache(_CACHED_SAMPLES)(self._measured)

    def __len__(self) -> int:
        return len(self._inner)

    def tokens(self, sample: int) -> Sequence[int]:
        """Return the ids of a sample."""
        return self._inner.tokens(sample)

    def infos(self, sample: int) -> Sequence[ItemInfo]:
        """Return the items of a sample with their sizes; one of a modality that nobody reads may have none.

        Raises:
            DataError: an item can't be measured; its file and line are named.
        """
        return self._infos(sample)

    def raw(self, sample: int, index: int) -> Any:
        """Return an item."""
        return self._inner.raw(sample, index)

    def where(self, sample: int) -> str:
        """Return where a sample comes from."""
        return self._inner.where(sample)

    def _measured(self, sample: int) -> tuple[ItemInfo, ...]:
        return tuple(info if info.size else self._measure(info) for info in self._inner.infos(sample))

    def _measure(self, info: ItemInfo) -> ItemInfo:
        encoder = self._encoders.get(info.modality)
        if encoder is None:  # told by whoever lays the sample out
            return info
        try:
            return attrs.evolve(info, size=tuple(encoder.measure(self._inner.raw(info.sample, info.index))))
        except UserError:
            raise  # the dataset's own, with its place
        except (ValueError, TypeError, OSError) as error:
            raise DataError(
                self._inner.where(info.sample),
                expected=f"an item that the {encoder.name} encoder can read",
                got=f"{info.modality} {info.index}: {error}",
            ) from error


def measured(dataset: Dataset | None, encoders: Mapping[str, EncoderSpec]) -> Dataset | None:
    """Return a dataset with all sizes; None stays None."""
    return None if dataset is None else MeasuredDataset(dataset, encoders)
