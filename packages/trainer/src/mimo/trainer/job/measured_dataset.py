"""A dataset whose items are as their encoders read them: measured where it gives no size, pictures opened from paths.

What kind of file a modality holds is its encoder's to say, since a modality may have any name: a second encoder of
pictures reads one that no dataset knows to be pictures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from mimo.data import (
    DataPart,
    Dataset,
    IndexFileError,
    ItemSize,
    JoinedIndex,
    Origin,
    SampleSizes,
    SampleTokens,
    ends_of,
    is_read_failure,
    load_image,
    open_image,
    origin_of,
    parts_of,
    retried,
    sources_of,
    weights_of,
)
from mimo.hooks import DataError, ItemInfo, RunError, UserError
from mimo.model import EncoderSpec, GeneratorSpec, noun_of

ItemSpec: TypeAlias = EncoderSpec | GeneratorSpec
"""A plugin that is given items."""
PICTURES = "image"
"""The modality that an `ItemSpec` names if it takes decoded pictures."""

_CACHED_SAMPLES = 256
"""A step asks for the same few samples several times."""
_KEPT_SAMPLES = 16
"""A sample's ids, weights and ends are asked for one after another, by some threads at once."""


class MeasuredDataset:
    """A dataset, with the sizes that it leaves to encoders, or those that an index knows.

    A sample that the index knows to be broken keeps its number, and is one token, the end, of weight 0.

    Args:
        inner: the dataset.
        encoders: by modality.
        known: what an index says.
        end: id that closes samples, for those that are broken.
    """

    def __init__(
        self, inner: Dataset, encoders: Mapping[str, ItemSpec], known: JoinedIndex | None = None, end: int = 0
    ) -> None:
        self._inner = inner
        self._encoders = encoders
        self._known = known
        self._end = end
        self._infos = lru_cache(_CACHED_SAMPLES)(self._measured)
        self._kept = lru_cache(_KEPT_SAMPLES)(self._kept_tokens)

    def __len__(self) -> int:
        return len(self._inner)

    def tokens(self, sample: int) -> Sequence[int]:
        """Return the ids of a sample."""
        if self.is_broken(sample):
            return [self._end]
        kept = self._kept(sample)
        return self._inner.tokens(sample) if kept is None else kept.ids  # type: ignore[return-value]  # as a sequence

    def parts(self) -> Sequence[DataPart]:
        """Return what the samples are taken from."""
        return parts_of(self._inner)

    def weights(self, sample: int) -> Sequence[float] | None:
        """Return the weights of a sample's tokens, None if it has none."""
        if self.is_broken(sample):
            return [0.0]
        kept = self._kept(sample)
        return weights_of(self._inner, sample) if kept is None else kept.weights  # type: ignore[return-value]  # likewise

    def ends(self, sample: int) -> Sequence[int] | None:
        """Return where a sample may be cut, None if anywhere."""
        if self.is_broken(sample):
            return None
        kept = self._kept(sample)
        if kept is None:
            return ends_of(self._inner, sample)
        return None if kept.ends is None else kept.ends.tolist()

    def origin(self) -> Origin | None:
        """Return where the samples come from, None where the dataset doesn't say."""
        return origin_of(self._inner)

    def sources(self) -> Sequence[tuple[str, Any]]:
        """Return what the dataset is made of, each with the sizes that it leaves to encoders."""
        return [(name, MeasuredDataset(source, self._encoders)) for name, source in sources_of(self._inner)]

    def sizes(self, samples: Sequence[int] | NDArray[np.int64]) -> SampleSizes | None:
        """Return what an index says of some samples, in the order in which they are given; None without one.

        Raises:
            DataError: the index is damaged.
        """
        try:
            return None if self._known is None else self._known.take(samples)
        except IndexFileError as error:
            where = f"{len(samples)} samples from {self.where(int(samples[0]))}"
            raise self._damaged(where, error) from error

    @property
    def known(self) -> JoinedIndex | None:
        """What indexes say; None where there are none."""
        return self._known

    def is_broken(self, sample: int) -> bool:
        """Tell whether an index knows a sample to be broken."""
        return self._known is not None and self._known.is_broken(sample)

    def encodes(self, sample: int) -> bool:
        """Tell whether the ids of a sample come from its text, and not from an index.

        Raises:
            DataError: the index is damaged.
        """
        return not self.is_broken(sample) and self._kept(sample) is None

    def infos(self, sample: int) -> Sequence[ItemInfo]:
        """Return the items of a sample with their sizes; one of a modality that nobody reads may have none.

        Raises:
            DataError: an item can't be measured; its file and line are named.
        """
        return self._infos(sample)

    def raw(self, sample: int, index: int) -> Any:
        """Return an item as its encoder takes it: a picture's path as the decoded picture.

        Raises:
            DataError: the picture can't be decoded; its file and line are named.
        """
        raw = self._inner.raw(sample, index)
        if not isinstance(raw, Path):
            return raw
        info = next(info for info in self.infos(sample) if info.index == index)
        encoder = self._encoders.get(info.modality)
        if encoder is None:
            return raw
        try:
            return decoded(encoder, raw)
        except ValueError as error:
            raise self._unreadable(info, encoder, error) from error

    def where(self, sample: int) -> str:
        """Return where a sample comes from."""
        return self._inner.where(sample)

    def _measured(self, sample: int) -> tuple[ItemInfo, ...]:
        known = self._known_items(sample)
        if known is None:
            return tuple(info if info.size else self._measure(info) for info in self._inner.infos(sample))
        return tuple(
            ItemInfo(sample=sample, index=item.number, modality=item.modality, size=item.size, role=item.role)
            for item in known
        )

    def _kept_tokens(self, sample: int) -> SampleTokens | None:
        try:
            return None if self._known is None else self._known.tokens_of(sample)
        except IndexFileError as error:
            raise self._damaged(self.where(sample), error) from error

    def _known_items(self, sample: int) -> tuple[ItemSize, ...] | None:
        try:
            return None if self._known is None else self._known.items_of(sample)
        except IndexFileError as error:
            raise self._damaged(self.where(sample), error) from error

    def _damaged(self, where: str, error: IndexFileError) -> DataError:
        """Return the refusal of an index."""
        return DataError(
            where,
            expected="an index of these data",
            got=f"a damaged one: {error}",
            fix=f"Run {index_command(self)} again.",
        )

    def _measure(self, info: ItemInfo) -> ItemInfo:
        encoder = self._encoders.get(info.modality)
        if encoder is None:  # refused when the sample is laid out
            return info
        try:
            raw = retried(partial(self._inner.raw, info.sample, info.index))
            return attrs.evolve(info, size=retried(partial(_size, encoder, raw)))
        except UserError:
            raise  # the dataset's own, with its place
        except (ValueError, TypeError, OSError) as error:
            raise self._unreadable(info, encoder, error) from error

    def _unreadable(self, info: ItemInfo, encoder: ItemSpec, error: Exception) -> UserError:
        where, got = self._inner.where(info.sample), f"{info.modality} {info.index}: {error}"
        if is_read_failure(error):  # no fault of the item
            return RunError(where, expected="a file system that can be read", got=got)
        return DataError(where, expected=f"an item that the {encoder.name} {noun_of(encoder)} can read", got=got)


def measured(
    dataset: Dataset | None, encoders: Mapping[str, ItemSpec], known: JoinedIndex | None = None, end: int = 0
) -> MeasuredDataset | None:
    """Return a dataset with all sizes, see `MeasuredDataset`; None stays None."""
    return None if dataset is None else MeasuredDataset(dataset, encoders, known, end)


def knows_all_sizes(dataset: Dataset) -> bool:
    """Tell whether every source of a dataset has an index."""
    known = dataset.known if isinstance(dataset, MeasuredDataset) else None
    return known is not None and all(part is not None for part in known.parts)


def index_command(dataset: Dataset | None) -> str:
    """Return what makes the index of a dataset anew: with --tokens where ids are kept, which would go without."""
    known = dataset.known if isinstance(dataset, MeasuredDataset) else None
    return f"`mimo data index FILE{' --tokens' if known is not None and known.keeps_tokens else ''}`"


def encodes(dataset: Dataset, sample: int) -> bool:
    """Tell whether a dataset makes the ids of a sample from its text; `DataError` as `MeasuredDataset.encodes`."""
    return not isinstance(dataset, MeasuredDataset) or dataset.encodes(sample)


def decoded(encoder: ItemSpec, raw: Any) -> Any:
    """Return a raw item as an encoder takes it: the path of a picture as the decoded picture, all else as it is.

    Raises:
        ValueError: the picture can't be decoded.
    """
    return load_image(raw) if _is_picture_path(encoder, raw) else raw


def _size(encoder: ItemSpec, raw: Any) -> tuple[int, ...]:
    """Return what an encoder measures, for the path of a picture from its header alone."""
    if not _is_picture_path(encoder, raw):
        return tuple(encoder.measure(raw))
    with open_image(raw) as image:
        return tuple(encoder.measure(image))


def _is_picture_path(encoder: ItemSpec, raw: Any) -> bool:
    """Tell whether an encoder that takes decoded pictures, by whatever name its modality goes, is given a path."""
    return encoder.modality == PICTURES and isinstance(raw, Path)
