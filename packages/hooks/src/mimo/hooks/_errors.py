"""Errors that a user can act on: where it is, what was expected, what was got, what to do.

Each class knows the exit code of the process that it ends, so that no caller maps one to the other. Values and texts of
others are shown cut, and without bytes that a terminal would obey.
"""

from __future__ import annotations

import re
from typing import ClassVar

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


class UserError(ValueError):
    """An error with its place, expectation, finding and next step.

    Characters that a terminal would obey are escaped in all four, and long values are cut.

    Args:
        where: full path of the setting (``modules.vision.tp``), or file and line for data (``train.jsonl:12``).
        expected: what would have been right, as a noun phrase.
        got: what was found; shown with ``repr`` unless it is text of ours, so pass ``repr(value)`` for user values.
        fix: the next step, as a whole sentence.
    """

    exit_code: ClassVar[int] = 3

    def __init__(self, where: str, *, expected: str, got: str, fix: str = "") -> None:
        self.where = _name(where)
        self.expected = _shown(expected)
        self.got = _shown(got)
        self.fix = _shown(fix)
        # What a library says may end with a full stop of its own; after a list of lines there is none.
        end = "" if self.got.endswith("\n") else ". "
        super().__init__(
            f"{self.where}: expected {self.expected}, got {self.got.removesuffix('.')}{end}{self.fix}".rstrip()
        )


def _shown(text: str) -> str:
    """Return words of a message; those of another message stay as they are."""
    return cut(plain_text(cut(text)))  # first, since a text may be very long, and again, since escapes lengthen it


def _name(where: str) -> str:
    """Return a place on one line, no longer than a path may be with a few words."""
    text = plain_text(where).replace("\n", "\\n")
    limit = 2 * MAX_PATH_SHOWN
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


class ConfigError(UserError):
    """A setting that is wrong by itself or beside another one; refused before anything is launched."""

    exit_code = 2


class PluginError(UserError):
    """A plugin that cannot be imported, clashes with another, or breaks the hook contract."""

    exit_code = 2

    def seen_from(self, setting: str) -> PluginError:
        """Return this error with the path of the setting that asked for plugins before its own place."""
        error = PluginError(f"{setting}: {self.where}", expected=self.expected, got=self.got, fix=self.fix)
        error.__cause__ = self.__cause__
        return error


class PlanError(UserError):
    """A plan that is incomplete or could deadlock; refused before a process group exists."""

    exit_code = 2


class DataError(UserError):
    """A sample that is broken; found at first use, named by file and line."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or does not fit."""


class SaveSkippedError(CheckpointError):
    """A checkpoint that was left out, as settings ask for, since the one before was still being written."""


class RunError(UserError):
    """A fault of a running job that is neither a setting's nor the data's."""


class RestartNeededError(UserError):
    """Only a restart can tell whether a device is at fault: the run is saved, and to be started again."""

    exit_code = 16


class ResultRejectedError(UserError):
    """A step that comes to the same wrong result on any device: the model or the data have to be changed."""

    exit_code = 17


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
