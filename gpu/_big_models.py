"""A decoder of a billion parameters, alone on packed text, or behind a ViT-L that reads JPEGs of free size; and jobs.

Texts and pictures are drawn from their numbers: nothing is read but pictures, which are decoded as those of users are.
"""

from __future__ import annotations

import io
import random
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
from _case import Case
from PIL import Image

from mimo.data import DATASETS, DatasetSpec, SplitName, Tokenizer
from mimo.hooks import ItemInfo, Kind
from mimo.trainer import Job, read_settings, resolve
from mimo.trainer.runtime import find_installed

PATCH, SAMPLES, PICTURES = 16, 1024, 64
MAX_TOKENS = 4096
"""Rows of a sample at most."""
DECODERS = ("decoder", "hf-decoder")
"""Plugins that make the decoder: of our own layers, or of the Llama of `transformers`."""
WORKERS = 4
"""Threads that decode beside the step, ours or others'."""
_RESERVED = 64
"""More ids than the end and placeholders have."""


@attrs.frozen(kw_only=True)
class Size:
    """Of a model and its step.

    Args:
        language: settings of the decoder.
        vision: of the encoder.
        words: of a sample at most; half of all have fewer than a third of that.
        sides: pixels of a picture's side at least and at most.
        batch: samples of a step.
        micro_batch: of a microbatch.
    """

    language: Mapping[str, int]
    vision: Mapping[str, int]
    words: int
    sides: tuple[int, int]
    batch: int
    micro_batch: int

    @property
    def llama(self) -> dict[str, int]:
        """The decoder in the words of a Llama's config, but for its vocabulary."""
        language = self.language
        return {
            "hidden_size": language["hidden"],
            "intermediate_size": language["intermediate"],
            "num_hidden_layers": language["layers"],
            "num_attention_heads": language["heads"],
            "num_key_value_heads": language["heads"],
            "max_position_embeddings": MAX_TOKENS,
        }

    def decoder(self, plugin: str) -> dict[str, Any]:
        """Return the settings of the decoder by one of `DECODERS`."""
        if plugin == "decoder":
            return dict(self.language)
        return {"model_type": "llama", "vocabulary": self.language["vocabulary"], "values": self.llama}


FULL = Size(
    language=MappingProxyType({"vocabulary": 32000, "hidden": 2048, "layers": 20, "heads": 16, "intermediate": 5632}),
    vision=MappingProxyType({"width": 1024, "layers": 24, "heads": 16, "intermediate": 4096}),
    words=1536,
    sides=(128, 384),
    batch=16,
    micro_batch=8,
)
TINY = Size(
    language=MappingProxyType({"vocabulary": 512, "hidden": 64, "layers": 2, "heads": 4, "intermediate": 96}),
    vision=MappingProxyType({"width": 32, "layers": 2, "heads": 2, "intermediate": 64}),
    words=24,
    sides=(32, 64),
    batch=8,
    micro_batch=4,
)


def size_of(case: Case) -> Size:
    """Return the size for a test."""
    return TINY if case.tiny else FULL


@attrs.frozen
class Seeded:
    """Texts of uneven lengths; with pictures, each sample begins with one or two of these and has less text."""

    size: Size
    pictures: bool
    tokenizer: Tokenizer

    @cached_property
    def jpegs(self) -> Sequence[tuple[bytes, tuple[int, int]]]:
        """Bytes of each picture, and how many pixels it has down and across."""
        return [_jpeg(number, self.size.sides) for number in range(PICTURES)]

    def __len__(self) -> int:
        """Return the number of samples."""
        return SAMPLES

    def tokens(self, sample: int) -> Sequence[int]:
        """Return placeholders of pictures, then ids that are drawn from the sample's number."""
        draw, most = random.Random(sample), self.size.words // (4 if self.pictures else 1)
        words = min(most, max(2, round(most / 3 * draw.lognormvariate(0, 0.8))))
        ids = np.random.default_rng(sample).integers(_RESERVED, self.tokenizer.vocabulary, words).tolist()
        items = [self.tokenizer.placeholder("image") for _ in self._pictures(sample)]
        return [*items, *ids, self.tokenizer.end]

    def infos(self, sample: int) -> Sequence[ItemInfo]:
        """Return the pictures."""
        return [
            ItemInfo(sample=sample, index=index, modality="image", size=self.jpegs[number][1])
            for index, number in enumerate(self._pictures(sample))
        ]

    def raw(self, sample: int, index: int) -> Image.Image:
        """Decode a picture."""
        with Image.open(io.BytesIO(self.jpegs[self._pictures(sample)[index]][0])) as image:
            return image.convert("RGB")

    def where(self, sample: int) -> str:
        """Name a sample."""
        return f"seeded:{sample}"

    def _pictures(self, sample: int) -> Sequence[int]:
        draw = random.Random(f"pictures {sample}")
        return [draw.randrange(PICTURES) for _ in range(draw.randint(1, 2))] if self.pictures else []


def _jpeg(number: int, sides: tuple[int, int]) -> tuple[bytes, tuple[int, int]]:
    """Return a picture of smooth noise."""
    draw = np.random.default_rng([7, number])
    height, width = (int(side) for side in draw.integers(sides[0], sides[1] + 1, 2))
    small = Image.fromarray(draw.integers(0, 256, (9, 9, 3), dtype=np.uint8))
    file = io.BytesIO()
    small.resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue(), (height, width)


@attrs.frozen(kw_only=True)
class _Config:
    """None."""


def make_job(
    case: Case,
    *,
    pictures: bool,
    decoder: str = "decoder",
    optimizer: Mapping[str, Any],
    steps: int = 1000,
    logging: Mapping[str, Any] = MappingProxyType({}),
    **run: Any,
) -> Job:
    """Resolve a job on one rank in bf16.

    Args:
        case: where, and how large.
        pictures: whether an encoder reads pictures before the text.
        decoder: which of `DECODERS` makes the decoder.
        optimizer: its settings beside rate and clipping.
        steps: of the run.
        logging: settings of `logging`.
        run: further settings of `run`.
    """
    size = size_of(case)

    def open_(_config: _Config, tokenizer: Tokenizer, split: SplitName) -> Seeded | None:
        return Seeded(size, pictures, tokenizer) if split == "train" else None

    def find(kind: Kind[Any], name: str, where: str) -> Any:
        if kind is DATASETS and name == "seeded":
            return DatasetSpec(name="seeded", config=_Config, open=open_)
        return find_installed(kind, name, where)

    vision = {**size.vision, "patch": PATCH, "mode": "native", "max_patches": 1024, "table": 16}
    modules: dict[str, Any] = {"language": {"plugin": decoder, "ranks": "0", "config": size.decoder(decoder)}}
    if pictures:
        modules["vision"] = {"plugin": "siglip", "ranks": "0", "config": {**vision, "resize_positions": "bilinear"}}
    words = [f"w{number}" for number in range(size.language["vocabulary"] - _RESERVED)]
    about = {"name": "day", "steps": steps, "global_batch": size.batch, "micro_batch": size.micro_batch}
    settings = {
        "run": {**about, "precision": "bf16", "device": case.kind, **run},
        "data": {"plugin": "seeded", "max_tokens": MAX_TOKENS, "workers": WORKERS},
        "tokenizer": {"plugin": "word", "words": words},
        "optimizer": {"lr": 1e-4, "clip": 1.0, **optimizer},
        "modules": modules,
        "logging": dict(logging),
    }
    return resolve(read_settings(settings), find=find)
