"""What a dataset or tokenizer plugin hands in, and what it must be able to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import attrs

from mimo.hooks import ItemInfo, PluginError

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
    """Samples by number; everything but `raw` is answered from text and headers alone.

    To lay a sample out, a run asks for all of it before it asks for another: it need be read and encoded only once.
    """

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
class DataPart:
    """A part of a dataset that samples are taken from by its own weight, and read epoch by epoch.

    Args:
        name: other than those of the dataset's other parts.
        samples: how many it has; they are numbered part after part.
        weight: how many samples are taken from it, compared with others.
        epochs: the same, counted in passes over its samples; no part has both, and all have the same one or neither,
            which is one epoch.
        shards: number of samples of each file that it lies in, in the order of their numbers; empty for one.
    """

    name: str
    samples: int
    weight: float | None = None
    epochs: float | None = None
    shards: tuple[int, ...] = ()

    def __attrs_post_init__(self) -> None:
        """Refuse what can't be."""
        if self.samples < 1 or min(self.shards, default=0) < 0 or sum(self.shards or (self.samples,)) != self.samples:
            msg = f"part {self.name!r}: expected samples, those of all shards together, got {self.samples}"
            raise ValueError(msg)
        for given in (self.weight, self.epochs):
            if given is not None and not 0 < given < math.inf:
                msg = f"part {self.name!r}: expected a finite weight above 0, got {given}"
                raise ValueError(msg)


class SupportsParts(Protocol):
    """What a `Dataset` may have besides: what it is made of, from which the order of samples follows."""

    def parts(self) -> Sequence[DataPart]:
        """Return the parts, whose samples together are the dataset's."""


def parts_of(dataset: Dataset) -> tuple[DataPart, ...]:
    """Return the parts of a dataset, the whole of it as one without a name if it says none; see `SupportsParts`.

    Raises:
        PluginError: they don't have as many samples as the dataset, share a name, or some alone have weights or epochs.
    """
    parts: Callable[[], Sequence[DataPart]] | None = getattr(dataset, "parts", None)
    if parts is None:
        return (DataPart(name="", samples=len(dataset)),)
    found = tuple(parts())
    total = sum(part.samples for part in found)
    given = {(part.weight is None, part.epochs is None) for part in found}
    for expected, got, holds in (
        (f"parts with {len(dataset)} samples together", f"{total}", total == len(dataset)),
        ("parts with names of their own", "a name twice", len({part.name for part in found}) == len(found)),
        ("weights of all parts, epochs of all, or none", "some", len(given) == 1 and (False, False) not in given),
    ):
        if not holds:
            raise PluginError(f"parts of {type(dataset).__name__}", expected=expected, got=got)
    return found


@attrs.frozen(kw_only=True)
class SourceTable:
    """A dataset that another one is made of, as settings have it.

    Args:
        plugin: dataset plugin.
        keys: settings of the plugin.
        own: other keys that are known in the same table, for suggestions.
    """

    plugin: str
    keys: Mapping[str, Any]
    own: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class DatasetSources:
    """How a dataset is made of others, each of any plugin: they are found, checked and opened for it.

    Args:
        tables: of its settings, returns what the others are, by path of their table inside of its own.
        join: of its settings and the others that have the split, by the same paths, returns the split, or None.
    """

    tables: Callable[[Any], Mapping[str, SourceTable]]
    join: Callable[[Any, Mapping[str, Dataset], SplitName], Dataset | None]


def _made_of_others(_config: Any, _tokenizer: Tokenizer, _split: SplitName) -> Dataset | None:
    msg = "a dataset that is made of others is opened by joining them"
    raise TypeError(msg)


def _one_of_both(spec: DatasetSpec, _attribute: Any, sources: DatasetSources | None) -> None:
    if (spec.open is _made_of_others) == (sources is None):
        msg = f"dataset {spec.name!r}: expected either open or sources, got {'both' if sources else 'neither'}"
        raise ValueError(msg)


@attrs.frozen(kw_only=True)
class DatasetSpec:
    """A dataset plugin: ``open(config, tokenizer, split)`` returns the split, or None where the data has none.

    Opening checks that files exist (`ConfigError` with the setting's path); it decodes nothing.

    ``encodes_samples``: each `encode` is of one sample's text, of which no more than ``data.max_tokens`` is used; the
    tokenizer that is handed in then leaves out the rest of a long one.

    ``sources``: in place of ``open``, for a dataset that is made of others.

    ``index(config, split)``: writes what `open` needs to know of data that it doesn't read whole, and returns the path;
    None without such a split.

    ``build(samples, folder, max_bytes=…)``: writes samples, each its key and what its members hold by extension, bytes
    or a file, as data that ``open`` reads, and returns the paths.
    """

    name: str
    config: type
    open: Callable[[Any, Tokenizer, SplitName], Dataset | None] = _made_of_others
    encodes_samples: bool = False
    sources: DatasetSources | None = attrs.field(default=None, validator=_one_of_both)
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


@attrs.frozen(kw_only=True)
class AnswerMetricSpec:
    """A metric of generated answers: ``score(answer, reference)`` returns a finite number, 1 for a right one."""

    name: str
    score: Callable[[str, str], float]
