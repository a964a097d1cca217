"""A dataset for benchmarks: samples of text alone, all of one length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from mimo.data import DATASETS, DatasetSpec, SplitName, Tokenizer
from mimo.hooks import ItemInfo, Kind
from mimo.trainer.runtime import find_installed

WORDS = [f"w{index}" for index in range(250)]


@attrs.frozen(kw_only=True)
class TextConfig:
    """Samples of ``words`` words."""

    words: int = 255


@attrs.frozen
class Text:
    """256 samples drawn from their number, without items."""

    config: TextConfig
    tokenizer: Tokenizer

    def __len__(self) -> int:
        """Return the number of samples."""
        return 256

    def tokens(self, sample: int) -> Sequence[int]:
        """Return the words and the end."""
        text = " ".join(WORDS[(sample * 7 + index * 3) % len(WORDS)] for index in range(self.config.words))
        return [*self.tokenizer.encode(text), self.tokenizer.end]

    def infos(self, _sample: int) -> Sequence[ItemInfo]:
        """Return none."""
        return []

    def raw(self, sample: int, _index: int) -> Any:
        """Return nothing: there are no items."""
        raise AssertionError(sample)

    def where(self, sample: int) -> str:
        """Name a sample."""
        return f"text:{sample}"


def _open(config: TextConfig, tokenizer: Tokenizer, _split: SplitName) -> Text:
    return Text(config, tokenizer)


def find(kind: Kind[Any], name: str, where: str) -> Any:
    """Find installed plugins, and the text dataset."""
    if kind is DATASETS and name == "text":
        return DatasetSpec(name="text", config=TextConfig, open=_open)
    return find_installed(kind, name, where)
