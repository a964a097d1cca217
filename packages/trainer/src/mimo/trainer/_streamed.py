"""Text of tokens as they come: each piece as soon as it is whole, none twice."""

from __future__ import annotations

import attrs

from mimo.data import Tokenizer

_BROKEN = "\N{REPLACEMENT CHARACTER}"


@attrs.define
class StreamedText:
    """Decodes ids one by one; all pieces together are what the tokenizer decodes of all ids at once.

    Not where a tokenizer shows letters otherwise once bytes that are none follow them, as those of SentencePiece do:
    what was told stays.

    A piece is what ids add to the text of those just before them, since a token's text may depend on its neighbour: a
    space between words, a letter whose bytes are spread over several tokens. It waits while its end may be the
    beginning of such a letter.

    Args:
        tokenizer: whose ids they are.
    """

    tokenizer: Tokenizer
    _before: list[int] = attrs.field(factory=list, init=False)
    """Ids of the last piece."""
    _waiting: list[int] = attrs.field(factory=list, init=False)

    def add(self, token: int) -> str:
        """Return the text that is known to stand by now, empty while a letter is open."""
        self._waiting.append(token)
        piece = self._piece()
        return "" if not piece or piece.endswith(_BROKEN) else self._take(piece)

    def end(self) -> str:
        """Return what is left when no more tokens come."""
        return self._take(self._piece())

    def _piece(self) -> str:
        before = self.tokenizer.decode(self._before)
        return self.tokenizer.decode([*self._before, *self._waiting])[len(before) :]

    def _take(self, piece: str) -> str:
        self._before, self._waiting = self._waiting, []
        return piece
