"""Errors that a user can act on: where it is, what was expected, what was got, what to do.

Each class knows the exit code of the process that it ends, so that no caller maps one to the other.
"""

from __future__ import annotations

from typing import ClassVar

from mimo.hooks._shown import MAX_PATH_SHOWN, cut, plain_text


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
