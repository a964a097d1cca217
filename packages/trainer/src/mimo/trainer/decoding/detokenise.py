"""Streaming detokenisation: each piece of text as soon as it is complete, none twice."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from mimo.data import Tokenizer

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_FOREIGN = "\U0010fffe"
"""A number that never becomes a letter: a tokenizer that knows bytes writes it in bytes."""


def _last_byte(text: StreamedText) -> list[int]:
    """Return the last id of `_FOREIGN`, a byte that begins no letter; none where the tokenizer can't write it."""
    try:
        return list(text.tokenizer.encode(_FOREIGN))[-1:]
    except ValueError:
        return []


@attrs.define
class StreamedText:
    """Decodes ids one by one; all pieces together are what the tokenizer decodes of all ids at once.

    A piece is what ids add to the text of those just before them, since a token's text may depend on its neighbour: a
    space between words, a letter whose bytes are spread over several tokens. It waits while its end may be
    part of such a letter, or while a byte more would change it: those of SentencePiece show each byte of a row as
    broken if one of them is.

    Args:
        tokenizer: whose ids they are.
    """

    tokenizer: Tokenizer
    _before: list[int] = attrs.field(factory=list, init=False)
    """Ids of the last piece."""
    _waiting: list[int] = attrs.field(factory=list, init=False)
    _byte: list[int] = attrs.field(default=attrs.Factory(_last_byte, takes_self=True), init=False)

    def add(self, token: int) -> str:
        """Return the text that is known to stand by now, empty while a letter is open."""
        self._waiting.append(token)
        piece = self._piece()
        stands = piece and not piece.endswith(_BROKEN) and self._piece(self._byte).startswith(piece)
        return self._take(piece) if stands else ""

    def end(self) -> str:
        """Return what is left when no more tokens come."""
        return self._take(self._piece())

    def _piece(self, more: Sequence[int] = ()) -> str:
        before = self.tokenizer.decode(self._before)
        return self.tokenizer.decode([*self._before, *self._waiting, *more])[len(before) :]

    def _take(self, piece: str) -> str:
        self._before, self._waiting = self._waiting, []
        return piece
