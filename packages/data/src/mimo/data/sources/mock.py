"""The mock dataset: samples of one shape whose contents mean nothing, to measure or try a layout without data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np

from mimo.data.samples import DatasetSpec, SplitName, Tokenizer
from mimo.hooks import ConfigError, ItemInfo, at_least, check_at_most, hookimpl

if TYPE_CHECKING:
    from PIL import Image

_WHERE = "data"
_IDS = 256
"""Of those of the tokenizer, so many first ones are drawn from, placeholders left out."""
_LIMITS: Mapping[str, int] = {
    "samples": 1 << 22,
    "text": 1 << 22,
    "images": 1 << 12,
    "height": 1 << 15,
    "width": 1 << 15,
}
_PLACEHOLDER = re.compile(r"<\w+>")


@attrs.frozen(kw_only=True)
class MockConfig:
    """Settings of ``data.plugin = "mock"``.

    Args:
        samples: how many there are.
        text: tokens of text of each, its end included.
        images: of each, before its text.
        height: of an image in pixels.
        width: likewise.
    """

    samples: int = attrs.field(default=1024, validator=at_least(1, where=_WHERE))
    text: int = attrs.field(default=512, validator=at_least(2, where=_WHERE))
    images: int = attrs.field(default=1, validator=at_least(0, where=_WHERE))
    height: int = attrs.field(default=512, validator=at_least(1, where=_WHERE))
    width: int = attrs.field(default=512, validator=at_least(1, where=_WHERE))

    def __attrs_post_init__(self) -> None:
        """Refuse what is too large, and a size of images where there are none."""
        check_at_most(self, _LIMITS, where="data")
        for field in (attrs.fields(MockConfig).height, attrs.fields(MockConfig).width):
            if not self.images and (value := getattr(self, field.name)) != field.default:
                raise ConfigError(
                    f"data.{field.name}",
                    expected="none, since images = 0",
                    got=repr(value),
                    fix="Leave it out, or set images.",
                )


@attrs.frozen(kw_only=True)
class MockDataset:
    """Text and pixels drawn from a sample's number alone.

    Args:
        config: how much of them.
        ids: from which text is drawn.
        placeholder: id of an image, 0 where there is none.
        end: id of the end.
    """

    config: MockConfig
    ids: tuple[int, ...]
    placeholder: int
    end: int

    def __len__(self) -> int:
        return self.config.samples

    def tokens(self, sample: int) -> Sequence[int]:
        """Return the images' placeholders, ids of text and the end."""
        drawn = np.random.default_rng((0, sample)).integers(len(self.ids), size=self.config.text - 1)
        return [*[self.placeholder] * self.config.images, *(self.ids[each] for each in drawn), self.end]

    def infos(self, sample: int) -> Sequence[ItemInfo]:
        """Return the images."""
        size = (self.config.height, self.config.width)
        return [
            ItemInfo(sample=sample, index=index, modality="image", size=size) for index in range(self.config.images)
        ]

    def raw(self, sample: int, index: int) -> Image.Image:
        """Return an image of noise in mode "RGB"."""
        from PIL import Image

        shape = (self.config.height, self.config.width, 3)
        noise = np.random.default_rng((1, sample, index)).integers(256, size=shape, dtype=np.uint8)
        return Image.fromarray(noise)

    def where(self, sample: int) -> str:
        """Return the sample's number."""
        return f"mock:{sample}"


def open_mock(config: MockConfig, tokenizer: Tokenizer, split: SplitName) -> MockDataset | None:
    """Return the samples to train on; none are held out."""
    if split != "train":
        return None
    placeholder = tokenizer.placeholder("image") if config.images else 0
    ids = range(min(tokenizer.vocabulary, _IDS))
    text = tuple(each for each in ids if each != tokenizer.end and not _PLACEHOLDER.fullmatch(tokenizer.decode([each])))
    return MockDataset(config=config, ids=text, placeholder=placeholder, end=tokenizer.end)


@hookimpl
def mimo_register_datasets() -> list[DatasetSpec]:
    """Return ``mock``."""
    return [DatasetSpec(name="mock", config=MockConfig, open=open_mock)]
