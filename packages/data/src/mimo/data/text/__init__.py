"""The tokenizers that come with this package, and the limit on how much text one of them takes."""

from mimo.data.text.limited import LimitedTokenizer

__all__ = ["LimitedTokenizer"]
