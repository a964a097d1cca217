"""The byte tokenizer: any text, without a vocabulary file. Ids: the bytes 0-255 of UTF-8, the end, the placeholders."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import ClassVar

import attrs

from mimo.data.samples import TokenizerSpec
from mimo.data.text.placeholders import Placeholders

_BYTES = 256
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


@attrs.frozen(kw_only=True)
class ByteConfig:
    """``tokenizer.plugin = "byte"`` has no settings."""


@attrs.frozen(kw_only=True)
class ByteTokenizer:
    """Every text has ids; decoding puts replacement characters where bytes are not UTF-8."""

    end: ClassVar[int] = _BYTES
    placeholders: Placeholders

    @property
    def vocabulary(self) -> int:
        """Number of ids."""
        return _BYTES + 1 + len(self.placeholders)

    def placeholder(self, modality: str) -> int:
        """Return the id of a modality's placeholder; `ConfigError` where it has none."""
        return self.placeholders.id_of(modality)

    def encode(self, text: str) -> list[int]:
        """Return the bytes of ``text``; half a surrogate pair is a `ValueError`."""
        ids: list[int] = []
        # Not `encode_spans`, which goes letter by letter: texts need no spans.
        for piece in self.placeholders.split(text):
            ids += [piece] if isinstance(piece, int) else piece.encode("utf-8")
        return ids

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the bytes of ``text``, and the letter of each."""
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        for begin, end, number in self.placeholders.spans(text):
            if number is not None:
                ids.append(number)
                spans.append((begin, end))
                continue
            for place in range(begin, end):
                letter = text[place].encode("utf-8")
                ids += letter
                spans += [(place, place + 1)] * len(letter)
        return ids, spans

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text; an id beyond the vocabulary shows as a replacement character."""
        marks = self.placeholders.text_of
        text = ""
        for is_byte, run in groupby((number for number in ids if number != self.end), key=lambda n: 0 <= n < _BYTES):
            if is_byte:
                text += bytes(run).decode("utf-8", errors="replace")
            else:
                text += "".join(marks.get(number, _UNKNOWN) for number in run)
        return text


def build(_config: ByteConfig, modalities: Sequence[str]) -> ByteTokenizer:
    """Return the tokenizer; see `TokenizerSpec`."""
    return ByteTokenizer(placeholders=Placeholders.numbered(modalities, first=_BYTES + 1))


SPEC = TokenizerSpec(name="byte", config=ByteConfig, build=build)
