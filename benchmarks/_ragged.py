"""Samples of uneven sizes, drawn or those of published packages, and jobs that train on them; nothing is decoded."""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
import tempfile
import wave
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import attrs
from PIL import Image

from mimo.data import DATASETS, DatasetSpec, SplitName, Tokenizer
from mimo.hooks import ItemInfo, Kind
from mimo.trainer import Job, read_settings, resolve
from mimo.trainer.runtime import find_installed

MICROBATCHES = 8
_REPEATED = 30
"""So often the few clips there are stand among the samples."""
_SIDE = 448
"""Longer sides of pictures are scaled to it."""
_STEPS = 40
"""At most, of an epoch."""
_LETTERS = 4
"""Of a token, about."""
_VIT = {"patch": 14, "width": 768, "layers": 12, "heads": 12, "intermediate": 3072}
_WHISPER = {"width": 768, "layers": 12, "heads": 12, "intermediate": 3072, "too_long": "cut"}
_DECODER = {"hidden": 1024, "layers": 16, "heads": 16, "intermediate": 4096}


@attrs.frozen(kw_only=True)
class Sizes:
    """A distribution: of each sample the tokens of its text, and the sizes of its items.

    Args:
        samples: of all.
        encoder: plugin of the module that reads the items.
        config: its settings.
        modality: of the items.
        micro_batch: samples of a microbatch for each language lane.
    """

    samples: Sequence[tuple[int, Sequence[tuple[int, int]]]]
    encoder: str = "vit"
    config: Mapping[str, Any] = attrs.field(factory=lambda: _VIT)
    modality: str = "image"
    micro_batch: int = 4


def draw_ragged(count: int, side: int = 224, words: int = 512, **keys: Any) -> Sizes:
    """Return samples of which 35 of 100 are text alone, and the others have 1 to 10 pictures of ``side`` pixels."""
    rng = random.Random(0)

    def sample() -> tuple[int, Sequence[tuple[int, int]]]:
        items = 0 if rng.random() < 0.35 else rng.randint(1, 10)
        return rng.randint(16, words), ((side, side),) * items

    return Sizes(samples=[sample() for _ in range(count)], **keys)


@cache
def read_stamps() -> Sizes:
    """Return the pictures of Debian's ``tuxpaint-stamps-default`` with their captions in every language (GPL-2).

    Raises:
        OSError: apt or dpkg is missing, or the package can't be had.
    """
    found: list[tuple[int, Sequence[tuple[int, int]]]] = []
    with _package("tuxpaint-stamps-default") as folder:
        for path in sorted(folder.rglob("*.png")):
            captions = path.with_suffix(".txt")
            if captions.is_file():
                width, height = struct.unpack(">II", path.read_bytes()[16:24])
                scale = min(_SIDE / max(width, height), 1.0)
                size = (max(int(height * scale), 14), max(int(width * scale), 14))
                lines = captions.read_text(encoding="utf-8", errors="replace").splitlines()
                found += [(len(line) // _LETTERS + 1, (size,)) for line in lines if line.strip()]
    return Sizes(samples=found, micro_batch=16)


@cache
def read_clips() -> Sizes:
    """Return the clips of Debian's ``asterisk-core-sounds-en-wav`` with the words of their names (CC-BY-SA 3.0).

    Raises:
        OSError: apt or dpkg is missing, or the package can't be had.
    """
    found: list[tuple[int, Sequence[tuple[int, int]]]] = []
    with _package("asterisk-core-sounds-en-wav") as folder:
        for path in sorted(folder.rglob("*.wav")):
            with wave.open(str(path)) as clip:
                found.append((len(path.stem) // _LETTERS + 1, ((clip.getnframes(), clip.getframerate()),)))
    return Sizes(samples=found * _REPEATED, encoder="whisper", config=_WHISPER, modality="audio", micro_batch=32)


class _package:  # noqa: N801 -- used as a function
    """The unpacked files of a Debian package, while it is entered."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> Path:
        self._folder = Path(tempfile.mkdtemp())
        try:
            self._run("apt-get", "download", self._name)
            self._run("dpkg", "-x", str(next(self._folder.glob("*.deb"))), "files")
        except (subprocess.CalledProcessError, StopIteration) as error:
            shutil.rmtree(self._folder)
            msg = f"package {self._name} can't be had: {error}"
            raise OSError(msg) from error
        return self._folder / "files"

    def _run(self, *words: str) -> None:
        subprocess.run(words, cwd=self._folder, check=True, capture_output=True)  # noqa: S603 -- words of this file

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder)


@attrs.frozen(kw_only=True)
class _Config:
    """None."""


@attrs.frozen
class _Dataset:
    sizes: Sizes
    tokenizer: Tokenizer

    def __len__(self) -> int:
        return len(self.sizes.samples)

    def tokens(self, sample: int) -> Sequence[int]:
        text, items = self.sizes.samples[sample]
        placeholder = self.tokenizer.placeholder(self.sizes.modality)
        return [*[placeholder] * len(items), *[self.tokenizer.end] * text]

    def infos(self, sample: int) -> Sequence[ItemInfo]:
        return [
            ItemInfo(sample=sample, index=index, modality=self.sizes.modality, size=size)
            for index, size in enumerate(self.sizes.samples[sample][1])
        ]

    def raw(self, sample: int, index: int) -> Image.Image:
        height, width = self.sizes.samples[sample][1][index]
        return Image.new("RGB", (width, height), (sample % 256, index, 0))

    def where(self, sample: int) -> str:
        return f"sizes:{sample}"


def make_job(
    sizes: Sizes,
    *,
    lanes: int,
    pp: int = 1,
    tp: int = 1,
    microbatches: int = MICROBATCHES,
    decoder: Mapping[str, Any] = _DECODER,
    beside: bool = True,
    gathered: bool = False,
) -> Job:
    """Resolve a job of an encoder and a language model.

    Args:
        sizes: of the samples.
        lanes: of the language model.
        pp: its pipeline ranks.
        tp: its tensor ranks; the encoder has so many lanes for each of its lanes.
        microbatches: of a step.
        decoder: settings of the language model.
        beside: whether each has ranks of its own; otherwise both share them, and take their costs from this machine.
        gathered: whether parameters are sharded over the lanes of each, and gathered for each computation.
    """

    def find(kind: Kind[Any], name: str, where: str) -> Any:
        if kind is DATASETS and name == "sizes":
            return DatasetSpec(name="sizes", config=_Config, open=open_)
        return find_installed(kind, name, where)

    def open_(_config: _Config, tokenizer: Tokenizer, _split: SplitName) -> _Dataset:
        return _Dataset(sizes, tokenizer)

    first = lanes * tp if beside else 0
    settings = {
        "run": {
            "name": "balance",
            "steps": 1,
            "global_batch": sizes.micro_batch * microbatches * lanes,
            "micro_batch": sizes.micro_batch,
            **({} if beside else {"device": "cpu"}),
        },
        "data": {"plugin": "sizes", "max_tokens": 1 << 14},
        "tokenizer": {"plugin": "word", "words": ["word"]},
        "optimizer": {"plugin": "distributed", "shard": "full"} if gathered else {},
        "modules": {
            "encoder": {
                "plugin": sizes.encoder,
                "modality": sizes.modality,
                "config": dict(sizes.config),
                "ranks": f"0-{lanes * tp - 1}",
                "dp": lanes * tp,
            },
            "language": {
                "plugin": "decoder",
                "config": dict(decoder),
                "ranks": f"{first}-{first + lanes * tp * pp - 1}",
                "dp": lanes,
                "pp": pp,
                "tp": tp,
            },
        },
    }
    return resolve(read_settings(settings), find=find)


def steps_of(job: Job) -> Iterator[Sequence[int]]:
    """Yield the samples of each step of an epoch, in the order of training."""
    assert job.train is not None
    batch = job.settings.run.global_batch
    order = job.sample_order()
    for step in range(1, min(max(len(job.train) // batch, 1), _STEPS) + 1):
        yield order.samples(step)
