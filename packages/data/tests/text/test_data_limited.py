"""Long texts of which a sample has room for the beginning alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs
import pytest

from mimo.data import LimitedTokenizer, Tokenizer
from mimo.data.text import byte_tokenizer, word_tokenizer

WORDS = ("the", "digit", "is", "seven")


@attrs.define
class Counting:
    """A tokenizer that counts the letters that it is given."""

    inner: Tokenizer
    letters: int = 0

    @property
    def vocabulary(self) -> int:
        return self.inner.vocabulary

    @property
    def end(self) -> int:
        return self.inner.end

    def placeholder(self, modality: str) -> int:
        return self.inner.placeholder(modality)

    def encode(self, text: str) -> list[int]:
        self.letters += len(text)
        return self.inner.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode(ids)


def long_text(seed: int, words: int) -> str:
    """Return words, and an image now and then."""
    rng = random.Random(seed)
    return "".join(rng.choice((*WORDS, *WORDS, "<image>")) + rng.choice((" ", "  ", "\n")) for _ in range(words))


def text_ids(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """Return ids without placeholders."""
    return [one for one in ids if one != tokenizer.placeholder("image")]


@pytest.mark.parametrize("kind", ["word", "byte"])
@pytest.mark.parametrize("limit", [1, 7, 64, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_data_a_long_text_has_the_ids_that_it_had_as_far_as_a_sample_reaches(kind: str, limit: int, seed: int) -> None:
    """Then one more of text, by which it is seen to be cut, and all placeholders, in their places or at the end."""
    inner = byte_tokenizer.build(byte_tokenizer.ByteConfig(), ["image"])
    words: Tokenizer = (
        inner if kind == "byte" else word_tokenizer.build(word_tokenizer.WordConfig(words=WORDS), ["image"])
    )
    text = long_text(seed, 40_000)
    whole = words.encode(text)
    found = LimitedTokenizer(inner=words, max_tokens=limit, modalities=("image",)).encode(text)
    beginning = text_ids(found, words)
    assert beginning == text_ids(whole, words)[: limit + 1]
    reach = next(place for place in range(len(found)) if len(text_ids(found[: place + 1], words)) == limit + 1)
    assert found[: reach + 1] == whole[: reach + 1]
    assert found.count(words.placeholder("image")) == whole.count(words.placeholder("image"))


def test_data_no_more_of_a_text_is_encoded_than_can_matter() -> None:
    """Of twenty million letters a few thousand."""
    inner = Counting(byte_tokenizer.build(byte_tokenizer.ByteConfig(), ["image"]))
    text = "word " * 4_000_000
    found = LimitedTokenizer(inner=inner, max_tokens=100, modalities=("image",)).encode(text)
    assert found == list(text[:101].encode())
    assert inner.letters < 20_000


def test_data_a_text_that_a_sample_may_hold_is_encoded_as_ever() -> None:
    """So is one of few long tokens, for which the beginning is not enough."""
    byte = byte_tokenizer.build(byte_tokenizer.ByteConfig(), [])
    for text in ("", "short", "x" * 8000):
        assert LimitedTokenizer(inner=byte, max_tokens=10_000, modalities=()).encode(text) == byte.encode(text)
    words = word_tokenizer.build(word_tokenizer.WordConfig(words=("w" * 1000,)), [])
    text = " ".join(["w" * 1000] * 50)
    assert LimitedTokenizer(inner=words, max_tokens=100, modalities=()).encode(text) == words.encode(text)


def test_data_half_a_word_ends_nothing() -> None:
    """The beginning of a text may end within a word that no list has so; words that no list has are told as ever."""
    word = "w" * 7000
    words = word_tokenizer.build(word_tokenizer.WordConfig(words=(word,)), [])
    limited = LimitedTokenizer(inner=words, max_tokens=1, modalities=())
    assert limited.encode(" ".join([word] * 50))[:2] == words.encode(f"{word} {word}")
    with pytest.raises(ValueError, match="is not among the tokenizer's 1 words"):
        limited.encode("other " * 10_000)
