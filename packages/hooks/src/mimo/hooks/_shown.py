"""How values and texts of others are shown in messages: cut, and without bytes that a terminal would obey."""

from __future__ import annotations

import re

MAX_SHOWN = 80
"""Characters of a value that a message shows; of a text with a slash, which may be a path, `MAX_PATH_SHOWN`."""
MAX_PATH_SHOWN = 255

_LITERALS = re.compile(
    r"""(?<!\w)b?(?:'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")|\d{40,}"""  # an apostrophe follows a letter
)
_OBEYED = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")
"""What a terminal obeys, what ends lines or reorders text, and halves of surrogate pairs; tabs and line feeds apart."""
_MAX_TEXT = 1 << 16
_PAIRS = {"[": "]", "(": ")", "{": "}"}


def plain_text(text: str) -> str:
    """Return a text with all characters escaped that do more than stand there, line feeds and tabs apart.

    A terminal would obey an escape sequence; a text whose direction is overridden would read otherwise than it is; half
    a surrogate pair can't be written at all. Spaces of any kind, and what joins letters, are text.
    """
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def cut(text: str) -> str:
    """Return a text with each value in it cut: what stands in quotes, long numbers, and a list that is all of it.

    What is cut stays as it is if it is cut again: a message may be made of another one's parts.
    """
    if len(text) <= MAX_SHOWN:
        return text
    if _PAIRS.get(text[0]) == text[-1] and "\n" not in text:
        return _shorten(text, MAX_SHOWN)
    return _LITERALS.sub(_cut_literal, _shorten(text, _MAX_TEXT))


def _cut_literal(found: re.Match[str]) -> str:
    text = found[0]
    quote = text[-1] if text[-1] in "'\"" else ""
    path = _shorten(text, MAX_PATH_SHOWN, quote)
    return path if "/" in path else _shorten(text, MAX_SHOWN, quote)


def _shorten(text: str, limit: int, end: str = "") -> str:
    return text if len(text) <= limit else f"{text[: limit - 1 - len(end)]}…{end}"
