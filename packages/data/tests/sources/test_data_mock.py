"""The mock dataset: the shapes that were asked for, the same contents every time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mimo.data import DatasetSpec, lay_out
from mimo.data.sources.mock import mimo_register_datasets
from mimo.data.text.tokenizers import mimo_register_tokenizers
from mimo.hooks import ConfigError


def _tokenizer(name: str, **keys: Any) -> Any:
    (spec,) = (spec for spec in mimo_register_tokenizers() if spec.name == name)
    return spec.build(spec.config(**keys), ["image", "audio"])


def _open(tokenizer: Any, **keys: Any) -> Any:
    spec: DatasetSpec
    (spec,) = mimo_register_datasets()
    assert spec.open(spec.config(**keys), tokenizer, "evaluation") is None
    return spec.open(spec.config(**keys), tokenizer, "train")


@pytest.mark.parametrize("tokenizer", [_tokenizer("byte"), _tokenizer("word", words=("one", "two"))])
def test_samples_have_the_shape_that_was_asked_for(tokenizer: Any) -> None:
    """Images first, then as much text, of ids that stand for text; laid out, the rows of both."""
    data = _open(tokenizer, samples=3, text=40, images=2, height=5, width=9)
    assert len(data) == 3
    tokens = data.tokens(1)
    image, audio = (tokenizer.placeholder(each) for each in ("image", "audio"))
    assert tokens[:2] == [image, image]
    assert tokens[-1] == tokenizer.end
    assert len(tokens) == 42
    assert not {image, audio, tokenizer.end} & set(tokens[2:-1])
    assert [(info.sample, info.index, info.size) for info in data.infos(1)] == [(1, 0, (5, 9)), (1, 1, (5, 9))]
    assert data.raw(1, 0).size == (9, 5)
    assert data.where(1) == "mock:1"
    rows = {"image": lambda size: size[0] * size[1]}
    assert len(lay_out(data, 1, tokenizer=tokenizer, rows=rows, max_tokens=1000).tokens) == 2 * 45 + 40


def test_samples_follow_from_their_number() -> None:
    """Text and pixels are the same every time, and differ from sample to sample and image to image."""
    data, again = (_open(_tokenizer("byte"), images=2) for _ in range(2))
    assert data.tokens(4) == again.tokens(4) != data.tokens(5)
    pixels = np.asarray(data.raw(4, 0))
    assert (pixels == np.asarray(again.raw(4, 0))).all()
    assert (pixels != np.asarray(data.raw(4, 1))).any()
    assert (pixels != np.asarray(data.raw(5, 0))).any()


def test_text_alone() -> None:
    """Without images no placeholder is needed."""
    data = _open(_tokenizer("byte"), images=0, text=2)
    assert len(data.tokens(0)) == 2
    assert data.infos(0) == []


@pytest.mark.parametrize(("key", "value"), [("samples", 0), ("text", 1), ("images", -1), ("height", 0), ("width", 0)])
def test_refused_settings(key: str, value: int) -> None:
    """Each setting out of range is named."""
    low = value + 1
    with pytest.raises(ConfigError, match=rf"data\.{key}: expected {low} or more, got {value}"):
        _open(_tokenizer("byte"), **{key: value})


@pytest.mark.parametrize("key", ["height", "width"])
def test_a_size_of_no_images_is_refused(key: str) -> None:
    """Nothing would have it."""
    with pytest.raises(ConfigError, match=rf"data\.{key}: expected none, since images = 0, got 8\. Leave it out, or"):
        _open(_tokenizer("byte"), images=0, **{key: 8})
