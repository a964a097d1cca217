"""What is generated after one prompt: the question, the sequence while it runs, the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import attrs
from torch import Tensor

from mimo.data import Dataset, SampleLayout
from mimo.trainer.decoding.detokenise import StreamedText

Ended: TypeAlias = Literal["end", "max_tokens"]


@attrs.frozen(kw_only=True, eq=False)
class Question:
    """A prompt, laid out.

    Args:
        number: of the prompt, from 0; draws depend on it.
        dataset: where its items come from.
        layout: of its tokens and items.
    """

    number: int
    dataset: Dataset
    layout: SampleLayout


@attrs.frozen(kw_only=True)
class Answer:
    """What was generated after a prompt.

    Args:
        number: of the prompt, from 0.
        text: what was generated.
        tokens: how many tokens it is, the end not counted.
        ended: ``"end"`` where the model ended it, ``"max_tokens"`` where there was no room for more.
        items: what was made beside the text, in the order of its placeholders: modality, and the item as datasets give
            one.
    """

    number: int
    text: str
    tokens: int
    ended: Ended
    items: Sequence[tuple[str, Any]] = ()


@attrs.define(eq=False)
class Running:
    """A sequence that runs.

    Args:
        question: that it continues.
        text: turns its tokens into text.
        ids: of the prompt, and what was generated.
        next_place: place of the next token on the axes of a grid, less what was generated; None where its positions
            are the places.
        rows: of the prompt's items, from the encoders, by module; kept where all of it is read again for each token.
        pieces: of its text.
        made: see `Answer.items`.
    """

    question: Question
    text: StreamedText
    ids: list[int] = attrs.field(init=False)
    next_place: int | None = attrs.field(init=False)
    rows: Mapping[str, Tensor] = attrs.field(factory=dict, init=False)
    pieces: list[str] = attrs.field(factory=list, init=False)
    made: list[tuple[str, Any]] = attrs.field(factory=list, init=False)
    _before: int = attrs.field(default=0, init=False)
    """Tokens that were generated before what the question is now."""

    def __attrs_post_init__(self) -> None:
        """Begin with the prompt."""
        self._begin()

    def _begin(self) -> None:
        self.ids = self.question.layout.tokens.tolist()
        places = self.question.layout.grid_positions
        self.next_place = None if places is None else int(places.max()) + 1

    @property
    def written(self) -> int:
        """How many tokens were generated; one for an item."""
        return self._before + self._since

    @property
    def _since(self) -> int:
        return len(self.ids) - len(self.question.layout.tokens)

    @property
    def place(self) -> int:
        """Place of the last token on the axes of a grid."""
        if self.next_place is None:
            return len(self.ids) - 1
        return self.next_place + self._since - 1

    def add(self, token: int) -> str:
        """Take a token, and return the piece of text that is known by it."""
        self.ids.append(token)
        return self._take(self.text.add(token))

    def take_item(self, item: tuple[str, Any], question: Question) -> None:
        """Take the item that the last token called for, and go on from a question that has it."""
        self.made.append(item)
        self._before = self.written
        self.question = question
        self.rows = {}
        self._begin()

    def end(self) -> str:
        """Return the piece of text that is left when no more tokens come."""
        return self._take(self.text.end())

    def answer(self, ended: Ended) -> Answer:
        """Return what came of it."""
        text = "".join(self.pieces)
        return Answer(number=self.question.number, text=text, tokens=self.written, ended=ended, items=tuple(self.made))

    def _take(self, piece: str) -> str:
        self.pieces.append(piece)
        return piece
