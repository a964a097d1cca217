"""What a dataset or tokenizer plugin hands in, and what it must be able to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import attrs

from mimo.hooks import ItemInfo

SplitName = Literal["train", "evaluation"]


class Tokenizer(Protocol):
    """Text to ids and back; a placeholder such as ``<image>`` in the text is one id."""

    @property
    def vocabulary(self) -> int:
        """Number of ids, special ones included."""

    @property
    def end(self) -> int:
        """Id that closes every sample."""

    def placeholder(self, modality: str) -> int:
        """Return the id that stands for one item of ``modality``.

        Raises:
            ConfigError: this tokenizer has none.
        """

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``, without the end.

        Raises:
            ValueError: the text holds something that has no id; the message says what.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``; the end is left out."""


class Dataset(Protocol):
    """Samples by number; everything but `raw` is answered from text and headers alone."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def tokens(self, sample: int) -> Sequence[int]:
        """Return the ids of a sample, the end included, with one placeholder id for each item."""

    def infos(self, sample: int) -> Sequence[ItemInfo]:
        """Return the items of a sample in the order of their placeholders, per modality.

        Where a size is empty, `raw` must cost no more than a header's reading: the item's encoder measures what it
        returns.
        """

    def raw(self, sample: int, index: int) -> Any:
        """Return item ``index`` undecoded, as its modality's encoders take it.

        An image is a `PIL.Image.Image`; a clip a path, the bytes of a file, or a pair (waveform, frames a second).
        """

    def where(self, sample: int) -> str:
        """Return where a sample comes from, for messages: ``train.jsonl:12``."""


class SupportsWeights(Protocol):
    """What a `Dataset` may have besides: how much each token counts that is to be predicted."""

    def weights(self, sample: int) -> Sequence[float] | None:
        """Return for each id of ``tokens(sample)`` the weight, from 0 on, of predicting it; None: each has 1.

        A weight belongs to the token that is predicted. Those of placeholders, and of the first token, are not used.
        """


def weights_of(dataset: Dataset, sample: int) -> Sequence[float] | None:
    """Return the weights that a dataset gives for a sample, None if it gives none; see `SupportsWeights`."""
    # By its name, since isinstance takes 10 microseconds to find out for a protocol.
    weights: Callable[[int], Sequence[float] | None] | None = getattr(dataset, "weights", None)
    return None if weights is None else weights(sample)


class SupportsEnds(Protocol):
    """What a `Dataset` may have besides: where a sample that is too long may be cut."""

    def ends(self, sample: int) -> Sequence[int] | None:
        """Return how many ids of ``tokens(sample)`` a cut sample may have, ascending; None: any number."""


def ends_of(dataset: Dataset, sample: int) -> Sequence[int] | None:
    """Return where a dataset lets a sample be cut, None if anywhere; see `SupportsEnds`."""
    ends: Callable[[int], Sequence[int] | None] | None = getattr(dataset, "ends", None)
    return None if ends is None else ends(sample)


@attrs.frozen(kw_only=True)
class DatasetSpec:
    """A dataset plugin: ``open(config, tokenizer, split)`` returns the split, or None where the data has none.

    Opening checks that files exist (`ConfigError` with the setting's path); it decodes nothing.

    ``encodes_samples``: each `encode` is of one sample's text, of which no more than ``data.max_tokens`` is used; the
    tokenizer that is handed in then leaves out the rest of a long one.

    ``index(config, split)``: writes what `open` needs to know of data that it doesn't read whole, and returns the path;
    None without such a split.

    ``build(samples, folder, max_bytes=…)``: writes samples, each its key and what its members hold by extension, bytes
    or a file, as data that ``open`` reads, and returns the paths.
    """

    name: str
    config: type
    open: Callable[[Any, Tokenizer, SplitName], Dataset | None]
    encodes_samples: bool = False
    index: Callable[[Any, SplitName], Path | None] | None = None
    build: Callable[..., Sequence[Path]] | None = None


@attrs.frozen(kw_only=True)
class TokenizerSpec:
    """A tokenizer plugin: ``build(config, modalities)`` returns one with a placeholder for each modality.

    Raises (from build):
        ConfigError: a setting under ``tokenizer.`` is wrong, or a modality can have no placeholder.
    """

    name: str
    config: type
    build: Callable[[Any, Sequence[str]], Tokenizer]
