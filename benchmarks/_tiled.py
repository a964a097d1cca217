"""A dataset for benchmarks: samples of one picture for each modality and some text, all of one size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
from PIL import Image

from mimo.data import DATASETS, DatasetSpec, SplitName, Tokenizer
from mimo.hooks import ItemInfo, Kind
from mimo.trainer.runtime import find_installed

WORDS = [f"w{index}" for index in range(250)]


@attrs.frozen(kw_only=True)
class TiledConfig:
    """Samples of pictures of ``pixels`` a side, one of each modality, and ``words`` words."""

    pixels: int
    words: int
    modalities: tuple[str, ...] = ("image",)


@attrs.frozen
class Tiled:
    """256 samples drawn from their number."""

    config: TiledConfig
    tokenizer: Tokenizer

    def __len__(self) -> int:
        """Return the number of samples."""
        return 256

    def tokens(self, sample: int) -> Sequence[int]:
        """Return a placeholder of each modality, the words and the end."""
        text = " ".join(WORDS[(sample * 7 + index * 3) % len(WORDS)] for index in range(self.config.words))
        pictures = "".join(f"<{modality}> " for modality in self.config.modalities)
        return [*self.tokenizer.encode(f"{pictures}{text}"), self.tokenizer.end]

    def infos(self, sample: int) -> Sequence[ItemInfo]:
        """Return the pictures."""
        size = (self.config.pixels, self.config.pixels)
        return [
            ItemInfo(sample=sample, index=index, modality=modality, size=size)
            for index, modality in enumerate(self.config.modalities)
        ]

    def raw(self, sample: int, index: int) -> Image.Image:
        """Return a picture."""
        side, first = self.config.pixels, sample + 128 * index
        return Image.frombytes("L", (side, side), bytes((first + 31 * at) % 256 for at in range(side * side)))

    def where(self, sample: int) -> str:
        """Name a sample."""
        return f"tiled:{sample}"


def _open(config: TiledConfig, tokenizer: Tokenizer, _split: SplitName) -> Tiled:
    return Tiled(config, tokenizer)


def find(kind: Kind[Any], name: str, where: str) -> Any:
    """Find installed plugins, and the tiled dataset."""
    if kind is DATASETS and name == "tiled":
        return DatasetSpec(name="tiled", config=TiledConfig, open=_open)
    return find_installed(kind, name, where)
