"""A dataset whose items are as their encoders read them: measured where it gives no size, pictures opened from paths.

What kind of file a modality holds is its encoder's to say, since a modality may have any name: a second encoder of
pictures reads one that no dataset knows to be pictures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import attrs

from mimo.data import DataPart, Dataset, ends_of, load_image, open_image, parts_of, retried, weights_of
from mimo.hooks import DataError, ItemInfo, UserError
from mimo.model import EncoderSpec

PICTURES = "image"
"""The modality that an `EncoderSpec` names if it takes decoded pictures."""

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

    def parts(self) -> Sequence[DataPart]:
        """Return what the samples are taken from."""
        return parts_of(self._inner)

    def weights(self, sample: int) -> Sequence[float] | None:
        """Return the weights of a sample's tokens, None if it has none."""
        return weights_of(self._inner, sample)

    def ends(self, sample: int) -> Sequence[int] | None:
        """Return where a sample may be cut, None if anywhere."""
        return ends_of(self._inner, sample)

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
        return tuple(info if info.size else self._measure(info) for info in self._inner.infos(sample))

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

    def _unreadable(self, info: ItemInfo, encoder: EncoderSpec, error: Exception) -> DataError:
        return DataError(
            self._inner.where(info.sample),
            expected=f"an item that the {encoder.name} encoder can read",
            got=f"{info.modality} {info.index}: {error}",
        )


def measured(dataset: Dataset | None, encoders: Mapping[str, EncoderSpec]) -> Dataset | None:
    """Return a dataset with all sizes; None stays None."""
    return None if dataset is None else MeasuredDataset(dataset, encoders)


def decoded(encoder: EncoderSpec, raw: Any) -> Any:
    """Return a raw item as an encoder takes it: the path of a picture as the decoded picture, all else as it is.

    Raises:
        ValueError: the picture can't be decoded.
    """
    return load_image(raw) if _is_picture_path(encoder, raw) else raw


def _size(encoder: EncoderSpec, raw: Any) -> tuple[int, ...]:
    """Return what an encoder measures, for the path of a picture from its header alone."""
    if not _is_picture_path(encoder, raw):
        return tuple(encoder.measure(raw))
    with open_image(raw) as image:
        return tuple(encoder.measure(image))


def _is_picture_path(encoder: EncoderSpec, raw: Any) -> bool:
    """Tell whether an encoder that takes decoded pictures, by whatever name its modality goes, is given a path."""
    return encoder.modality == PICTURES and isinstance(raw, Path)
