"""Text exactly ``<modality>`` stands for one item; this is where tokenizers find it and number it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Self

import attrs

from mimo.hooks import ConfigError


def mark(modality: str) -> str:
    """Return the placeholder of a modality as it stands in text."""
    return f"<{modality}>"


@attrs.frozen
class Placeholders:
    """The placeholder ids of the known modalities; ``<video>`` is plain text where only images are known."""

    ids: Mapping[str, int]

    @classmethod
    def numbered(cls, modalities: Sequence[str], first: int) -> Self:
        """Return placeholders that take the ids from ``first`` on, a modality named twice only one."""
        return cls({modality: first + offset for offset, modality in enumerate(dict.fromkeys(modalities))})

    def __len__(self) -> int:
        return len(self.ids)

    def id_of(self, modality: str) -> int:
        """Return the id of a modality's placeholder.

        Raises:
            ConfigError: the tokenizer was built without it.
        """
        if modality not in self.ids:
            raise ConfigError(
                "tokenizer",
                expected=f"a placeholder {mark(modality)}",
                got=f"one built with {', '.join(map(mark, self.ids)) or 'none'}",
                fix=f"Build it for modality {modality!r} too.",
            )
        return self.ids[modality]

    @property
    def text_of(self) -> Mapping[int, str]:
        """The text of each placeholder id."""
        return {number: mark(modality) for modality, number in self.ids.items()}

    def split(self, text: str) -> Iterator[str | int]:
        """Yield the text between placeholders, where there is any, and the placeholders' ids, in order."""
        numbers = {mark(modality): number for modality, number in self.ids.items()}
        pieces = re.split(f"({'|'.join(map(re.escape, numbers))})", text) if numbers else [text]
        for piece in pieces:
            if piece in numbers:
                yield numbers[piece]
            elif piece:
                yield piece

    def spans(self, text: str) -> Iterator[tuple[int, int, int | None]]:
        """Yield begin and end of what `split` yields, and the id of those that are placeholders."""
        texts, begin = self.text_of, 0
        for piece in self.split(text):
            length = len(piece if isinstance(piece, str) else texts[piece])
            yield begin, begin + length, None if isinstance(piece, str) else piece
            begin += length
