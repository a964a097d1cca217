"""The ``digits`` dataset: 1,797 images of 8 x 8 pixels, to be read, "<image> the digit is seven", or to be drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs
import numpy as np

from mimo.data import DatasetSpec, SplitName, Tokenizer
from mimo.hooks import ConfigError, ItemInfo, ItemRole, hookimpl, must_be

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image

_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

WORDS = ("the", "digit", "is", *_DIGITS, "draw")
"""Every word of the captions: what ``tokenizer.words`` must hold for all tasks."""

TaskName: TypeAlias = Literal["read", "draw", "both"]

_READ: tuple[str, ItemRole] = ("<image> the digit is {}", "input")
_DRAW: tuple[str, ItemRole] = ("draw {} <image>", "output")
_TASKS: Mapping[TaskName, tuple[tuple[str, ItemRole], ...]] = {
    "read": (_READ,),
    "draw": (_DRAW,),
    "both": (_READ, _DRAW),
}
"""Of each the captions that every image has, one after another, and what the model does with the image."""

# scikit-learn's grey values are 0 (paper) to 16 (ink).
_INK = 16

# Changing it changes which images are held out, so that results before and after cannot be compared.
_SPLIT_SEED = 1797


@attrs.frozen(kw_only=True)
class DigitsConfig:
    """Settings of ``data.plugin = "digits"``.

    Args:
        held_out: share of the images kept for evaluation; 0.2 keeps 359.
        task: ``read`` an image and say which digit it is, ``draw`` one for a digit, or ``both``, a sample for each.
    """

    held_out: float = attrs.field(
        default=0.2,
        validator=must_be("a share greater than 0 and less than 1", lambda share: 0 < share < 1, where="data"),
    )
    task: TaskName = "read"


@attrs.frozen(kw_only=True)
class DigitsTask:
    """What a model is to do with images.

    Args:
        role: of each image.
        captions: for each digit, the ids of its caption and the end.
    """

    role: ItemRole
    captions: tuple[tuple[int, ...], ...]


@attrs.frozen(kw_only=True, eq=False)
class DigitsDataset:
    """One split: sample n of N images does the first task with image n, sample N + n the second one, if there is one.

    Args:
        images: ``[N, height, width]``, 0 for paper to 255 for ink.
        labels: the digits ``[N]``.
        numbers: where each image stands in scikit-learn's order ``[N]``.
        tasks: one, or two.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    numbers: NDArray[np.int64]
    tasks: tuple[DigitsTask, ...]

    def __len__(self) -> int:
        return len(self.tasks) * len(self.numbers)

    def tokens(self, sample: int) -> Sequence[int]:
        """Return the ids of the caption."""
        task, image = self._of(sample)
        return task.captions[self.labels[image]]

    def infos(self, sample: int) -> Sequence[ItemInfo]:
        """Return the one image."""
        task, _ = self._of(sample)
        height, width = self.images.shape[1:]
        return [ItemInfo(sample=sample, index=0, modality="image", size=(height, width), role=task.role)]

    def raw(self, sample: int, index: int) -> Image.Image:  # noqa: ARG002 - there is only item 0
        """Return the image in mode "L"."""
        from PIL import Image

        _, image = self._of(sample)
        return Image.fromarray(self.images[image])

    def where(self, sample: int) -> str:
        """Return the image's number in scikit-learn's order."""
        _, image = self._of(sample)
        return f"digits:{self.numbers[image]}"

    def _of(self, sample: int) -> tuple[DigitsTask, int]:
        """Return the task of a sample, and which image it is about."""
        task, image = divmod(sample, len(self.numbers))
        return self.tasks[task], image


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
    split: tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]],
    tokenizer: Tokenizer,
    task: TaskName = "read",
) -> DigitsDataset:
    """Return the dataset of what `load_split` or `cut_split` has returned."""
    texts = [(role, [caption.format(word) for word in _DIGITS]) for caption, role in _TASKS[task]]
    said = {word for _, captions in texts for caption in captions for word in caption.split()}
    words = [word for word in WORDS if word in said]
    tasks = tuple(
        DigitsTask(role=role, captions=tuple(_caption(tokenizer, caption, words) for caption in captions))
        for role, captions in texts
    )
    images, labels, numbers = split
    return DigitsDataset(images=images, labels=labels, numbers=numbers, tasks=tasks)


def _caption(tokenizer: Tokenizer, text: str, words: Sequence[str]) -> tuple[int, ...]:
    try:
        return (*tokenizer.encode(text), tokenizer.end)
    except ValueError as error:
        raise ConfigError(
            "tokenizer",
            expected=f"one that encodes the caption {text!r}",
            got=str(error),
            fix=f"With the word tokenizer: tokenizer.words must hold {', '.join(words)}; <image> comes with a module "
            'of modality "image".',
        ) from error


@hookimpl
def mimo_register_datasets() -> list[DatasetSpec]:
    """Return ``digits``."""
    return [DatasetSpec(name="digits", config=DigitsConfig, open=open_digits)]
