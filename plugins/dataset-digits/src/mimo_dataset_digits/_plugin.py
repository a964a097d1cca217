"""The ``digits`` dataset: 1,797 images of 8 x 8 pixels, each with the caption "<image> the digit is seven".

Or they are to be drawn: "draw seven <image>".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs
import numpy as np

from mimo.data import DatasetSpec, SplitName, Tokenizer
from mimo.hooks import ConfigError, ItemInfo, hookimpl, must_be

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image

_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

WORDS = ("the", "digit", "is", *_DIGITS)
"""Every word of the captions: what ``tokenizer.words`` must hold to read."""
DRAW_WORDS = ("draw", *_DIGITS)
"""What it must hold to draw."""
Task: TypeAlias = Literal["read", "draw", "both"]

# scikit-learn's grey values are 0 (paper) to 16 (ink).
_INK = 16

# Changing it changes which images are held out, so that results before and after cannot be compared.
_SPLIT_SEED = 1797


@attrs.frozen(kw_only=True)
class DigitsConfig:
    """Settings of ``data.plugin = "digits"``.

    Args:
        held_out: share of the images kept for evaluation; 0.2 keeps 359.
        task: ``read`` images and say which digit each is, ``draw`` the digit that is asked for, or ``both``: first a
            sample to read of each image, then one to draw.
    """

    held_out: float = attrs.field(
        default=0.2,
        validator=must_be("a share greater than 0 and less than 1", lambda share: 0 < share < 1, where="data"),
    )
    task: Task = "read"


@attrs.frozen(kw_only=True, eq=False)
class DigitsDataset:
    """One split, of N images.

    Args:
        images: ``[N, height, width]``, 0 for paper to 255 for ink.
        labels: the digits ``[N]``.
        numbers: where each image stands in scikit-learn's order ``[N]``.
        captions: for each digit, the ids of its caption and the end; empty where none is read.
        orders: for each digit, the ids that ask for a drawing of it, its placeholder and the end; empty where none is
            drawn.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    numbers: NDArray[np.int64]
    captions: tuple[tuple[int, ...], ...]
    orders: tuple[tuple[int, ...], ...] = ()

    def __len__(self) -> int:
        return len(self.numbers) * (bool(self.captions) + bool(self.orders))

    def tokens(self, sample: int) -> Sequence[int]:
        """Return the ids of the text."""
        texts = self.orders if self._draws(sample) else self.captions
        return texts[self.labels[self._image(sample)]]

    def infos(self, sample: int) -> Sequence[ItemInfo]:
        """Return the one image, which is read or to be drawn."""
        height, width = self.images.shape[1:]
        role: Literal["input", "output"] = "output" if self._draws(sample) else "input"
        return [ItemInfo(sample=sample, index=0, modality="image", size=(height, width), role=role)]

    def raw(self, sample: int, index: int) -> Image.Image:  # noqa: ARG002 - there is only item 0
        """Return the image in mode "L"."""
        from PIL import Image

        return Image.fromarray(self.images[self._image(sample)])

    def where(self, sample: int) -> str:
        """Return the image's number in scikit-learn's order."""
        return f"digits:{self.numbers[self._image(sample)]}"

    def _draws(self, sample: int) -> bool:
        return bool(self.orders) and (not self.captions or sample >= len(self.numbers))

    def _image(self, sample: int) -> int:
        """Return which of the images a sample is of."""
        if not 0 <= sample < len(self):
            raise IndexError(sample)
        return sample % len(self.numbers)


def load_split(held_out: float, split: SplitName) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """Return images, labels and numbers of one split, as `DigitsDataset` has them."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # it ships no types

    data = load_digits()
    return cut_split(data.images, data.target, held_out, split)


def cut_split(
    images: NDArray[Any], digits: NDArray[Any], held_out: float, split: SplitName
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """Return one split of scikit-learn's digits, from wherever they were read; see `load_split`.

    Args:
        images: ``[1797, 8, 8]``, 0 for paper to 16 for ink, in scikit-learn's order.
        digits: what they show ``[1797]``.
        held_out: share of the images kept for evaluation.
        split: which.
    """
    total = len(digits)
    # Raw bits, whose stream numpy promises to keep, so that the split is the same everywhere.
    order = np.argsort(np.random.Philox(np.random.SeedSequence(_SPLIT_SEED)).random_raw(total), kind="stable")
    count = min(max(round(held_out * total), 1), total - 1)
    numbers = np.sort(order[count:] if split == "train" else order[:count])
    grey = np.rint(images[numbers] * (255 / _INK)).astype(np.uint8)
    return grey, digits[numbers].astype(np.int64), numbers.astype(np.int64)


def open_digits(config: DigitsConfig, tokenizer: Tokenizer, split: SplitName) -> DigitsDataset:
    """Return one split; which images are held out depends on ``held_out`` alone, never on a run's seed."""
    return open_split(load_split(config.held_out, split), tokenizer, config.task)


def open_split(
    split: tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]], tokenizer: Tokenizer, task: Task = "read"
) -> DigitsDataset:
    """Return the dataset of what `load_split` or `cut_split` has returned."""
    words = [*(() if task == "draw" else WORDS), *(() if task == "read" else DRAW_WORDS)]
    captions = [f"<image> the digit is {word}" for word in _DIGITS if task != "draw"]
    orders = [f"draw {word} <image>" for word in _DIGITS if task != "read"]
    images, labels, numbers = split
    return DigitsDataset(
        images=images,
        labels=labels,
        numbers=numbers,
        captions=tuple(_encoded(tokenizer, text, words) for text in captions),
        orders=tuple(_encoded(tokenizer, text, words) for text in orders),
    )


def _encoded(tokenizer: Tokenizer, text: str, words: Sequence[str]) -> tuple[int, ...]:
    try:
        return (*tokenizer.encode(text), tokenizer.end)
    except ValueError as error:
        raise ConfigError(
            "tokenizer",
            expected=f"one that encodes the caption {text!r}",
            got=str(error),
            fix="With the word tokenizer: tokenizer.words must hold " + ", ".join(dict.fromkeys(words)) + ".",
        ) from error


@hookimpl
def mimo_register_datasets() -> list[DatasetSpec]:
    """Return ``digits``."""
    return [DatasetSpec(name="digits", config=DigitsConfig, open=open_digits)]
