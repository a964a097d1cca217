"""The word tokenizer: a fixed list of words, for small closed vocabularies and tests.

Ids: the end, the placeholders, then the words in their order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import attrs

from mimo.data.samples import TokenizerSpec
from mimo.data.text.placeholders import Placeholders
from mimo.hooks import ConfigError

UNKNOWN = "\N{REPLACEMENT CHARACTER}"


@attrs.frozen(kw_only=True)
class WordConfig:
    """Settings of ``tokenizer.plugin = "word"``; at least one word, from either or both.

    Args:
        words: the words, each without white space.
        file: UTF-8 text with one word per line, numbered after ``words``.
    """

    words: tuple[str, ...] = ()
    file: str | None = None


@attrs.frozen(kw_only=True)
class WordTokenizer:
    """Splits on white space and around placeholders; every other piece must be a word of the list."""

    end: ClassVar[int] = 0
    placeholders: Placeholders
    ids: Mapping[str, int]

    @property
    def vocabulary(self) -> int:
        """Number of ids."""
        return 1 + len(self.placeholders) + len(self.ids)

    def placeholder(self, modality: str) -> int:
        """Return the id of a modality's placeholder; `ConfigError` where it has none."""
        return self.placeholders.id_of(modality)

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``; a word that is not in the list is a `ValueError` that names it."""
        return self.encode_spans(text)[0]

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of ``text``, and where the word of each begins and ends."""
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        for begin, end, number in self.placeholders.spans(text):
            if number is not None:
                ids.append(number)
                spans.append((begin, end))
                continue
            for found in re.finditer(r"\S+", text[begin:end]):
                word = found[0]
                if word not in self.ids:
                    msg = f"the word {word!r} is not among the tokenizer's {len(self.ids)} words"
                    raise ValueError(msg)
                ids.append(self.ids[word])
                spans.append((begin + found.start(), begin + found.end()))
        return ids, spans

    def decode(self, ids: Sequence[int]) -> str:
        """Return the words joined with spaces; an id beyond the vocabulary shows as a replacement character."""
        words = {number: word for word, number in self.ids.items()} | dict(self.placeholders.text_of)
        return " ".join(words.get(number, UNKNOWN) for number in ids if number != self.end)


def build(config: WordConfig, modalities: Sequence[str]) -> WordTokenizer:
    """Return the tokenizer; see `TokenizerSpec`."""
    placeholders = Placeholders.numbered(modalities, first=1)
    ids: dict[str, int] = {}
    for where, place, word in _words(config):
        problem = None
        if word.split() != [word]:
            problem = "empty or holds white space"
        elif list(placeholders.split(word)) != [word]:
            problem = "holds a placeholder, which has an id of its own"
        elif word in ids:
            problem = "stands there twice"
        if problem is not None:
            raise ConfigError(where, expected="different words", got=f"{word!r} ({place}), which {problem}")
        ids[word] = 1 + len(placeholders) + len(ids)
    if not ids:
        raise ConfigError(
            "tokenizer.words",
            expected="at least one word",
            got="none",
            fix='List them, or name a file with one word per line: tokenizer.file = "words.txt".',
        )
    return WordTokenizer(placeholders=placeholders, ids=ids)


def _words(config: WordConfig) -> Iterator[tuple[str, str, str]]:
    """Yield (setting, place in it, word) for each word."""
    for index, word in enumerate(config.words):
        yield "tokenizer.words", f"word {index + 1}", word
    if config.file is None:
        return
    try:
        lines = Path(config.file).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(
            "tokenizer.file",
            expected="a readable UTF-8 text file with one word per line",
            got=f"{config.file!r} ({error})",
            fix="Check the path; it is relative to the folder in which the command runs.",
        ) from error
    for index, line in enumerate(lines):
        yield "tokenizer.file", f"{config.file}:{index + 1}", line


SPEC = TokenizerSpec(name="word", config=WordConfig, build=build)
