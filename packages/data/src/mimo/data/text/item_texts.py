"""Texts in the place of others before a text becomes tokens, and where in the first text each token lies."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Self

import attrs

from mimo.hooks import ConfigError


@attrs.frozen
class ItemTexts:
    """What takes the place of which texts."""

    texts: Mapping[str, str]

    @classmethod
    def of(cls, items: Mapping[str, str], placeholders: Mapping[str, str], others: Mapping[str, str]) -> Self:
        """Return what takes the place of all that stands for an item.

        Args:
            items: of a modality, the text of an item.
            placeholders: of a modality, the token of its placeholder.
            others: what else stands for an item, with the modality.

        Raises:
            ConfigError: the text of an item doesn't hold its placeholder once.
        """
        for modality, text in items.items():
            if text.count(placeholders[modality]) != 1:
                raise ConfigError(
                    f"tokenizer.items.{modality}",
                    expected=f"a text that holds the placeholder {placeholders[modality]} once",
                    got=repr(text),
                )
        known = {**others, **{placeholders[modality]: modality for modality in items}}
        return cls({text: items[modality] for text, modality in known.items() if modality in items})

    def instead_of(self, text: str) -> str:
        """Return the text that is to become tokens."""
        return self._pattern.sub(lambda found: self.texts[found[0]], text) if self.texts else text

    def spans_in(self, text: str, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return begin and end in ``text`` of what lies there in `instead_of` it; all of a text for a part of it.

        Args:
            text: the first one.
            spans: begin and end in the other one.
        """
        found = [each.span() for each in self._pattern.finditer(text)] if self.texts else []
        if not found:
            return list(spans)
        begins: list[int] = []  # of what was put in, in the other text
        ends: list[int] = []
        more = 0
        for begin, end in found:
            begins.append(begin + more)
            more += len(self.texts[text[begin:end]]) - (end - begin)
            ends.append(end + more)

        def begin_of(place: int) -> int:
            index = bisect_right(begins, place) - 1
            if index < 0:
                return place
            return found[index][0] if place < ends[index] else found[index][1] + place - ends[index]

        def end_of(place: int) -> int:
            index = bisect_left(begins, place) - 1
            if index < 0:
                return place
            return found[index][1] if place <= ends[index] else found[index][1] + place - ends[index]

        return [(begin_of(begin), max(begin_of(begin), end_of(end))) for begin, end in spans]

    @property
    def _pattern(self) -> re.Pattern[str]:
        # The longest first: one may be the beginning of another.
        return re.compile("|".join(map(re.escape, sorted(self.texts, key=len, reverse=True))))
