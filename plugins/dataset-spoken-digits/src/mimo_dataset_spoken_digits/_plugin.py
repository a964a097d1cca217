"""The ``spoken-digits`` dataset: clips with the caption "<audio> the digit is seven".

With a picture beside each it is "<image> <audio> it shows two and says seven".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from mimo.data import DatasetSpec, SplitName, Tokenizer
from mimo.hooks import ConfigError, ItemInfo, hookimpl
from mimo_dataset_spoken_digits._clips import DIGITS, Clip, clips_of, spoken_clips

if TYPE_CHECKING:
    from numpy.typing import NDArray

WORDS = ("the", "digit", "is", "it", "shows", "and", "says", *DIGITS)
"""Every word of the captions, with pictures and without: what ``tokenizer.words`` must hold."""

_MAX_PICTURES = 1024
_PAIRS_SEED = 1797  # which picture stands beside which clip


@attrs.frozen(kw_only=True)
class SpokenDigitsConfig:
    """Settings of ``data.plugin = "spoken-digits"``.

    Args:
        folder: where the clips are kept; what isn't there is made at first use.
        program: that speaks, espeak-ng by name or path.
        pictures: for each clip, how many handwritten digits it is shown with, in as many samples; 0 for none. Which are
            held out is the default of the dataset ``digits``.
    """

    folder: str
    program: str = "espeak-ng"
    pictures: int = attrs.field(default=0)

    @pictures.validator
    def _check_pictures(self, _: attrs.Attribute[int], value: int) -> None:
        if not 0 <= value <= _MAX_PICTURES:
            raise ConfigError("data.pictures", expected=f"a whole number from 0 to {_MAX_PICTURES}", got=repr(value))


@attrs.frozen(kw_only=True, eq=False)
class SpokenDigitsDataset:
    """One split.

    Args:
        folder: of its clips.
        clips: that are spoken.
        sizes: (frames, frames a second) of each by file.
        pictures: ``[P, height, width]``, 0 for paper to 255 for ink; empty without pictures.
        shown: the digits of the pictures ``[P]``.
        pairs: for each sample its clip, and its picture or -1 ``[N, 2]``.
        captions: the ids of each caption by shown (None: no picture) and spoken digit.
    """

    folder: Path
    clips: tuple[Clip, ...]
    sizes: Mapping[str, tuple[int, int]]
    pictures: NDArray[np.uint8]
    shown: NDArray[np.int64]
    pairs: NDArray[np.int64]
    captions: Mapping[tuple[int | None, int], tuple[int, ...]]

    def __len__(self) -> int:
        return len(self.pairs)

    def tokens(self, sample: int) -> Sequence[int]:
        """Return the ids of the caption."""
        clip, picture = self.pairs[sample]
        return self.captions[None if picture < 0 else int(self.shown[picture]), self.clips[clip].digit]

    def infos(self, sample: int) -> Sequence[ItemInfo]:
        """Return the picture, if there is one, and the clip."""
        clip, picture = self.pairs[sample]
        sizes: list[tuple[str, tuple[int, ...]]] = [("audio", self.sizes[self.clips[clip].file])]
        if picture >= 0:
            sizes.insert(0, ("image", self.pictures.shape[1:]))
        return [
            ItemInfo(sample=sample, index=index, modality=modality, size=size)
            for index, (modality, size) in enumerate(sizes)
        ]

    def raw(self, sample: int, index: int) -> Any:
        """Return the picture in mode "L", or the path of the clip."""
        clip, picture = self.pairs[sample]
        if picture >= 0 and index == 0:
            from PIL import Image

            return Image.fromarray(self.pictures[picture])
        return self.folder / self.clips[clip].file

    def where(self, sample: int) -> str:
        """Return the clip's file, and the picture's number within the split."""
        clip, picture = self.pairs[sample]
        return str(self.folder / self.clips[clip].file) + ("" if picture < 0 else f" with picture {picture}")


def open_spoken_digits(config: SpokenDigitsConfig, tokenizer: Tokenizer, split: SplitName) -> SpokenDigitsDataset:
    """Return one split; other speakers, speeds, pitches and pictures than in the other, whatever a run's seed."""
    clips = clips_of(split)
    captions: dict[tuple[int | None, int], tuple[int, ...]] = {}
    for spoken, says in enumerate(DIGITS):
        if not config.pictures:
            captions[None, spoken] = _caption(tokenizer, f"<audio> the digit is {says}")
        for shown, shows in enumerate(DIGITS if config.pictures else ()):
            captions[shown, spoken] = _caption(tokenizer, f"<image> <audio> it shows {shows} and says {says}")
    pictures, shown_digits = _pictures(config, split)
    samples = len(clips) * max(1, config.pictures)
    pairs = np.full((samples, 2), -1, dtype=np.int64)
    pairs[:, 0] = np.arange(samples) % len(clips)
    if config.pictures:
        # Raw bits, whose stream numpy promises to keep, so that the pairs are the same everywhere.
        drawn = np.random.Philox(np.random.SeedSequence([_PAIRS_SEED, len(clips)])).random_raw(samples)
        pairs[:, 1] = (drawn % np.uint64(len(pictures))).astype(np.int64)
    folder = Path(config.folder)
    return SpokenDigitsDataset(
        folder=folder / split,
        clips=clips,
        sizes=spoken_clips(folder, config.program, split),
        pictures=pictures,
        shown=shown_digits,
        pairs=pairs,
        captions=captions,
    )


def _pictures(config: SpokenDigitsConfig, split: SplitName) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    if not config.pictures:
        return np.empty((0, 0, 0), dtype=np.uint8), np.empty(0, dtype=np.int64)
    from mimo_dataset_digits import DigitsConfig, load_split

    images, labels, _ = load_split(DigitsConfig().held_out, split)
    return images, labels


def _caption(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    try:
        return (*tokenizer.encode(text), tokenizer.end)
    except ValueError as error:
        raise ConfigError(
            "tokenizer",
            expected=f"one that encodes the caption {text!r}",
            got=str(error),
            fix="With the word tokenizer: tokenizer.words must hold " + ", ".join(WORDS) + ".",
        ) from error


@hookimpl
def mimo_register_datasets() -> list[DatasetSpec]:
    """Return ``spoken-digits``."""
    return [DatasetSpec(name="spoken-digits", config=SpokenDigitsConfig, open=open_spoken_digits)]
