"""A dataset for the oracle: text of uneven length, and 0, 1 or 3 pictures or clips of all sizes anywhere in it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal

import attrs
import numpy as np
from PIL import Image

from mimo.data import DatasetSpec, SplitName, Tokenizer
from mimo.hooks import DataError, ItemInfo, hookimpl

WORDS = tuple(f"w{index}" for index in range(26))
SAMPLES = 96
HELD_OUT = 30
"""As many as make a whole batch of 24 and a part of one."""


@attrs.frozen(kw_only=True)
class SyntheticConfig:
    """How many pictures, or items of other modalities, samples hold.

    ``pictures``: ``mixed`` (0, 1 or 3 each), ``none``, ``first`` (only the first sample of every 24 in data order has
    any), ``digits`` (exactly one each), ``many`` (0 to 5 pictures, 0 to 2 clips).
    ``weights``: of tokens, ``none``, ``one`` (each 1), ``zero``, ``mixed`` (none, all zero, or zeros and fractions and
    larger ones), ``first`` (as with pictures, all others are zero).
    ``damaged``: samples whose first item can't be decoded.
    ``roles``: by modality, of which each item has one at random; without, it has none.
    ``words``: fewest and most of a sample. ``side``: the most pixels of a side of a picture.
    """

    pictures: str = "mixed"
    modalities: tuple[str, ...] = ("image",)
    weights: str = "none"
    damaged: tuple[int, ...] = ()
    roles: Mapping[str, tuple[Literal["input", "output", "both"], ...]] = attrs.field(factory=dict, hash=False)
    words: tuple[int, int] = (1, 9)
    side: int = 9


@attrs.frozen
class SyntheticDataset:
    """Samples drawn from their number alone."""

    config: SyntheticConfig
    tokenizer: Tokenizer
    samples: int = SAMPLES

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.samples

    def tokens(self, sample: int) -> Sequence[int]:
        """Return ids, with a placeholder for each picture and clip, and the end."""
        pieces = _draw(self.config, sample)
        text = " ".join(piece if isinstance(piece, str) else f"<{piece.modality}>" for piece in pieces)
        return [*self.tokenizer.encode(text), self.tokenizer.end]

    def weights(self, sample: int) -> Sequence[float] | None:
        """Return the weights of the ids."""
        if self.config.weights == "none":
            return None
        rng, count = random.Random(f"weights {sample}"), len(self.tokens(sample))
        ragged = [rng.choice((0.0, 0.25, 1.0, 3 * rng.random())) for _ in range(count)]
        return {
            "one": [1.0] * count,
            "zero": [0.0] * count,
            "mixed": rng.choice((None, [0.0] * count, ragged, [0.0] * (count // 2) + [1.0] * (count - count // 2))),
            "first": [0.0] * count if sample % 24 else ragged,
        }[self.config.weights]

    def infos(self, sample: int) -> Sequence[ItemInfo]:
        """Return the pictures and clips, numbered in the order of the text."""
        return _infos(self.config, sample)

    def raw(self, sample: int, index: int) -> Any:
        """Return noise: a picture, or the waveform of a clip and its rate."""
        info = self.infos(sample)[index]
        if sample in self.config.damaged and index == 0:
            raise DataError(self.where(sample), expected="noise", got="silence")
        if info.modality == "audio":
            frames, rate = info.size
            return np.random.default_rng([sample, index]).uniform(-1, 1, frames).astype(np.float32), rate
        height, width = info.size
        return Image.frombytes("L", (width, height), _noise(sample, index, height * width))

    def where(self, sample: int) -> str:
        """Name a sample."""
        return f"synthetic:{sample}"


@cache
def _draw(config: SyntheticConfig, sample: int) -> Sequence[str | ItemInfo]:
    """Return words and items in order."""
    rng = random.Random(sample)
    pieces: list[str | ItemInfo] = [rng.choice(WORDS) for _ in range(rng.randint(*config.words))]
    for modality in config.modalities:
        count = {
            "mixed": rng.choice((0, 1, 3)),
            "none": 0,
            "first": 3 if sample % 24 == 0 else 0,
            "digits": 1,
            "many": random.Random(f"{sample} {modality}").randint(0, 2 if modality == "audio" else 5),
        }[config.pictures]
        for index in range(count):
            size = _size(modality, rng, config.side)
            at = rng.randint(0, len(pieces))
            pieces.insert(at, ItemInfo(sample=sample, index=index, modality=modality, size=size))
    return tuple(pieces)


@cache
def _infos(config: SyntheticConfig, sample: int) -> Sequence[ItemInfo]:
    """Return the items of a sample, numbered in order."""
    found = [piece for piece in _draw(config, sample) if isinstance(piece, ItemInfo)]
    rng = random.Random(f"roles {sample}")
    roles: list[Any] = [rng.choice(config.roles.get(info.modality, ("",))) for info in found]
    return tuple(
        attrs.evolve(info, index=index, role=role) for index, (info, role) in enumerate(zip(found, roles, strict=True))
    )


@cache
def _noise(sample: int, index: int, count: int) -> bytes:
    """Return the pixels of a picture."""
    rng = random.Random(f"{sample} {index}")
    return bytes(rng.randrange(256) for _ in range(count))


def _size(modality: str, rng: random.Random, side: int) -> tuple[int, int]:
    """Return a picture's height and width, or the frames and the rate of a clip of a fifth of a second at most."""
    if modality != "audio":
        return rng.randint(1, side), rng.randint(1, side)
    rate = rng.choice((8_000, 16_000))
    return rng.randint(1, rate // 5), rate


def _open(config: SyntheticConfig, tokenizer: Tokenizer, split: SplitName) -> SyntheticDataset:
    return SyntheticDataset(config, tokenizer, SAMPLES if split == "train" else HELD_OUT)


@hookimpl
def mimo_register_datasets() -> list[DatasetSpec]:
    """Register ``synthetic``."""
    return [DatasetSpec(name="synthetic", config=SyntheticConfig, open=_open)]
