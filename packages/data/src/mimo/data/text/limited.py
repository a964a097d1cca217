"""A tokenizer of texts of which only the beginning can matter, since samples are cut: it encodes no more of a long one.

Its ids are those of the whole text as far as a sample reaches, and after these the placeholders of the rest, which
are counted against the items.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import attrs

from mimo.data.samples import Tokenizer
from mimo.data.text.placeholders import mark

_LETTERS = 16
"""As many for each token at first; where tokens are longer, twice as many until there are enough."""
_FEWEST_LETTERS = 4096


@attrs.frozen(kw_only=True)
class LimitedTokenizer:
    """A tokenizer for samples of ``max_tokens`` ids at most; short texts it encodes as the inner one does.

    A long text is encoded twice, up to two ends that are white space, if there is any; where both give the same ids as
    far as the limit, these are taken. They are those of the whole text for any tokenizer whose ids depend on text
    within the distance of the two ends, at least 4,096 letters: exactly so for bytes and words, and for any that
    splits text into words first. What could not be encoded beyond the limit is not looked at.

    Args:
        inner: the tokenizer.
        max_tokens: ids of a sample at most.
        modalities: whose placeholders it knows.
    """

    inner: Tokenizer
    max_tokens: int
    modalities: tuple[str, ...]

    @property
    def vocabulary(self) -> int:
        """Number of ids."""
        return self.inner.vocabulary

    @property
    def end(self) -> int:
        """Id that closes every sample."""
        return self.inner.end

    def placeholder(self, modality: str) -> int:
        """Return the id of a modality's placeholder; `ConfigError` where it has none."""
        return self.inner.placeholder(modality)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return self.inner.decode(ids)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text as far as a sample can reach, and the placeholders of the rest.

        Raises:
            ValueError: the inner one can't encode what is looked at.
        """
        ids = self._first(text, self.inner.encode)
        if ids is None:
            return self.inner.encode(text)
        return [*ids, *(number for number, _ in self._rest(text, ids))]

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the same, and the letters of each; for tokenizers that can say them."""
        encode = self.inner.encode_spans  # type: ignore[attr-defined]  # see ChatTokenizer
        spans: list[tuple[int, int]] = []  # of what was encoded last

        def encode_ids(part: str) -> list[int]:
            ids, spans[:] = encode(part)
            return cast("list[int]", ids)

        ids = self._first(text, encode_ids)
        if ids is None:
            return encode_ids(text), spans
        rest = self._rest(text, ids)
        return [*ids, *(number for number, _ in rest)], [*spans[: len(ids)], *(span for _, span in rest)]

    def chat_template(self) -> Any:
        """Return the template of the inner one; None if it has none."""
        own = getattr(self.inner, "chat_template", None)
        return None if own is None else own()

    def _first(self, text: str, encode: Callable[[str], list[int]]) -> list[int] | None:
        """Return the ids of a long text as far as a sample can reach, None where it is to be encoded whole."""
        letters = max(_FEWEST_LETTERS, _LETTERS * self.max_tokens)
        known = frozenset(self._ids().values())
        before: list[int] = []
        while 2 * letters < len(text):
            stop = self._end_near(text, letters)
            try:
                ids = self._beginning(encode(text[:stop]), known)
            except ValueError:  # of half a word, it may be
                ids = []
            if ids and ids == before:
                return ids
            before, letters = ids, 2 * letters
        return None

    def _rest(self, text: str, ids: Sequence[int]) -> list[tuple[int, tuple[int, int]]]:
        """Return id and place of the placeholders of a text that come after those among its first ids."""
        known = frozenset(self._ids().values())
        return self._marks(text)[sum(number in known for number in ids) :]

    def _beginning(self, ids: list[int], placeholders: Collection[int]) -> list[int]:
        """Return ids up to the first of text that no sample has room for; none where all have."""
        room = self.max_tokens
        for place, one in enumerate(ids):
            if one not in placeholders:
                if not room:
                    return ids[: place + 1]
                room -= 1
        return []

    def _end_near(self, text: str, stop: int) -> int:
        """Return where to end near ``stop``: before white space if there is some, and within no placeholder."""
        spaces = re.compile(r"\s").search(text, stop, min(len(text), stop + _FEWEST_LETTERS // 2))
        if spaces is not None:
            return spaces.start()
        marks = [each for modality in self.modalities for each in self._texts(modality)]
        longest = max(map(len, marks), default=0)
        for begin in range(max(0, stop - longest + 1), stop):
            if any(text.startswith(each, begin) for each in marks):
                return begin
        return stop

    def _marks(self, text: str) -> list[tuple[int, tuple[int, int]]]:
        """Return id and place of the placeholders of a text, in order."""
        texts = {text: number for modality, number in self._ids().items() for text in self._texts(modality)}
        if not texts:
            return []
        written = "|".join(map(re.escape, texts))
        return [(texts[found[0]], found.span()) for found in re.finditer(written, text)]

    def _texts(self, modality: str) -> tuple[str, ...]:
        """Return what stands for an item in texts."""
        own = getattr(self.inner, "item_texts", None)
        return (mark(modality),) if own is None else own(modality)

    def _ids(self) -> dict[str, int]:
        return {modality: self.inner.placeholder(modality) for modality in self.modalities}
