"""Whether the modules of a whole model together compute what it computes: found out on a thin one of its family.

The language model reads rows of images in the places of placeholders, at positions and with items as training has them.
What a published model does besides, such as rows that are scaled, shows in its logits alone, so these are compared.

Shapes: T rows of packed samples, S of one of them, V vocabulary.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import torch
from torch import Tensor

from mimo.checkpoint import open_published
from mimo.data import SampleLayout, lay_out, pack
from mimo.hooks import ConfigError, ItemInfo
from mimo.model import EncoderSpec, HfExample, HfWhole, LanguageModelSpec, Stage, match_names
from mimo.model.runtime import LanguageBatch, read_hf
from mimo.trainer.config.settings import LANGUAGE
from mimo.trainer.published.part import CONFIG_NAME, HfPart, read_again

_TOLERANCE = 1e-5
_SAMPLES: Mapping[str, Sequence[int | None]] = {
    "text alone": (7,),
    "an image between texts": (3, None, 5),
    "two images of unlike sizes and no text behind": (None, 4, None),
}
"""Samples to compare, each as runs of so many words of text, and images."""
_MAX_TOKENS = 1 << 20


def check_whole(parts: Sequence[HfPart]) -> None:
    """Compare a whole model that is read as an encoder and a language model with both together.

    Parts of which no encoder reads a whole model, or that come from several folders, are not compared.

    Args:
        parts: that are to be imported.

    Raises:
        ConfigError: a thin model of the family has other logits, or can't be tried.
    """
    for encoder in parts:
        whole = encoder.reader.family.whole
        for language in parts:
            if whole is not None and language.name == LANGUAGE and language.folder == encoder.folder:
                _check(encoder, language, whole)


def _check(encoder: HfPart, language: HfPart, whole: HfWhole) -> None:
    try:
        differences = _differences(encoder, language, whole)
    except Exception as error:  # whatever a model of a library does
        got = f"a thin one that fails with {type(error).__name__}: {error}"
        raise _refusal(encoder, language, got, _ALONE) from error
    if all(one <= _TOLERANCE for one in differences.values()):
        return
    agree = [name for name, one in differences.items() if one <= _TOLERANCE]
    shown = ", ".join(f"{one:.1e} in {name}" for name, one in differences.items() if not one <= _TOLERANCE)
    got = f"a thin one whose logits differ by {shown}" + (f", and not in {' or '.join(agree)}" if agree else "")
    raise _refusal(encoder, language, got, _ALONE if agree else _OTHER)


_ALONE = (
    "What it does with images besides can't be trained. Name the part of it that is wanted: language={0} or vision={0}."
)
_OTHER = "Name another plugin for its text, --plugin NAME, if one computes it, or the part that is wanted: vision={0}."


def _refusal(encoder: HfPart, language: HfPart, got: str, fix: str) -> ConfigError:
    plugins = f"{encoder.reader.spec.name!r} and {language.reader.spec.name!r}"
    return ConfigError(
        str(encoder.folder / CONFIG_NAME),
        expected=f"a model that computes what {plugins} compute together: text, and rows of images in its places",
        got=f"{encoder.reader.family.architecture}, {got}",
        fix=fix.format(encoder.folder),
    )


def _differences(encoder: HfPart, language: HfPart, whole: HfWhole) -> dict[str, float]:
    """Return for each sample how far its logits are from the library's, relative to the largest of these."""
    decided = whole.settings(encoder.config).keys()
    with TemporaryDirectory(prefix="mimo-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        example = whole.example(encoder.config, encoder.described, folder)
        for file in encoder.reader.family.files:
            if (encoder.folder / file).is_file():
                shutil.copyfile(encoder.folder / file, folder / file)
        sees, reads = (read_again(part, folder, whole=whole, decided=decided) for part in (encoder, language))
        samples = _Samples(example=example, encoder=sees)
        with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
            ours = _logits(samples, sees, reads, whole)
            theirs = [example.logits(each.tokens.tolist(), samples.raws(each)) for each in samples.layouts]
    return {
        name: float((one - other).abs().max() / other.abs().max())
        for name, one, other in zip(_SAMPLES, ours, theirs, strict=True)
    }


@attrs.frozen(kw_only=True, eq=False)
class _Samples:
    """The samples as a dataset, and a tokenizer of its own that has an id for any text.

    Args:
        example: whose ids and images they consist of.
        encoder: that reads the images.
    """

    example: HfExample
    encoder: HfPart

    @property
    def vocabulary(self) -> int:
        """Number of ids."""
        return self.example.words.stop

    @property
    def end(self) -> int:
        """Id of a text."""
        return self.example.words.start

    def placeholder(self, _modality: str) -> int:
        """Return the id of a row of an image."""
        return self.example.placeholder

    def encode(self, text: str) -> list[int]:
        """Return an id for a text."""
        words = self.example.words
        return [words[zlib.crc32(text.encode()) % len(words)]] if text else []

    def decode(self, ids: Sequence[int]) -> str:
        """Return numbers, as the ids mean nothing."""
        return " ".join(map(str, ids))

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(_SAMPLES)

    def tokens(self, sample: int) -> Sequence[int]:
        """Return words, other ones everywhere, and placeholders."""
        words = iter(self.encode(f"{sample} {word}")[0] for word in range(_MAX_TOKENS))
        pieces = [*_SAMPLES.values()][sample]
        return [
            one
            for piece in pieces
            for one in ([self.example.placeholder] if piece is None else [next(words) for _ in range(piece)])
        ]

    def infos(self, sample: int) -> Sequence[ItemInfo]:
        """Return the images of a sample."""
        count = [*_SAMPLES.values()][sample].count(None)
        spec = self._spec
        sizes = [spec.measure(self.raw(sample, index)) for index in range(count)]
        return [
            ItemInfo(sample=sample, index=index, modality=spec.modality, size=size) for index, size in enumerate(sizes)
        ]

    def raw(self, sample: int, index: int) -> Any:
        """Return an image, another than before it in the sample."""
        items = self.example.items
        return items[(sample + index + 1) % len(items)]

    def where(self, sample: int) -> str:
        """Return the name of a sample."""
        return f"sample {sample} of a trial"

    def raws(self, layout: SampleLayout) -> list[Any]:
        """Return the images that lie in a sample."""
        return [self.raw(layout.sample, item.info.index) for item in layout.items]

    @property
    def layouts(self) -> tuple[SampleLayout, ...]:
        """All samples as training has them."""
        spec, config = self._spec, self.encoder.config
        return tuple(
            lay_out(
                self,
                sample,
                tokenizer=self,
                rows={spec.modality: partial(spec.rows, config)},
                max_tokens=_MAX_TOKENS,
                grids={} if spec.grid is None else {spec.modality: partial(spec.grid, config)},
                patterns={} if spec.pattern is None else {spec.modality: partial(spec.pattern, config)},
            )
            for sample in range(len(self))
        )

    @property
    def _spec(self) -> EncoderSpec:
        spec = self.encoder.reader.spec
        assert isinstance(spec, EncoderSpec)
        return spec


def _logits(samples: _Samples, encoder: HfPart, language: HfPart, whole: HfWhole) -> tuple[Tensor, ...]:
    """Return the logits [S, V] of each sample, packed, by both modules."""
    sees, reads = encoder.reader.spec, language.reader.spec
    assert isinstance(sees, EncoderSpec)
    assert isinstance(reads, LanguageModelSpec)
    layouts = samples.layouts
    packed = pack(layouts, with_items=reads.reads_items(language.config))
    batch = LanguageBatch.of(
        torch.from_numpy(packed.tokens),
        torch.from_numpy(packed.labels),
        torch.from_numpy(packed.positions),
        lengths=packed.lengths,
        placeholders={encoder.name: torch.from_numpy(packed.placeholders[sees.modality])},
        grid_positions=None if packed.grid_positions is None else torch.from_numpy(packed.grid_positions),
        items=packed.items,
    )
    tower = _filled(encoder, sees.build(encoder.config, whole.hidden(encoder.config)))
    model = _filled(language, reads.build(language.config, Stage()))
    rows = tower([sees.prepare(encoder.config, raw) for layout in layouts for raw in samples.raws(layout)])
    logits: Tensor = model.logits(model(batch, {encoder.name: rows}, None)).float()
    return torch.split(logits, list(packed.lengths))


def _filled(part: HfPart, module: Any) -> Any:
    """Return a module with its tensors of a folder; what these don't hold for it shows in what it computes."""
    read_hf(module, part.reader.family, part.config, dict(_tensors(part)))
    return module


def _tensors(part: HfPart) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a folder that belong to a module."""
    folder, family = open_published(part.folder), part.reader.family
    _, table = match_names(family, family.tensors(part.config), folder.tensors)
    for name in dict.fromkeys(name for entry in table for name in entry.names if name in folder.tensors):
        one = folder.tensors[name]
        yield name, torch.cat([chunk.clone() for chunk in folder.elements(name, 0, one.numbers)]).reshape(one.shape)
