"""Prompts in a jsonl file: samples as people write them, open at their end, for a model to continue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from mimo.data.samples import Tokenizer
from mimo.data.sources.lines import Lines, find_lines
from mimo.data.sources.record import Record
from mimo.data.sources.record_dataset import RecordDataset
from mimo.data.text import Chat, ChatSettings, ChatTokens
from mimo.hooks import ConfigError, DataError


class PromptLines(RecordDataset):
    """The prompts of a file, one a line, each the beginning of a sample.

    Args:
        lines: of the file.
        tokenizer: of their texts.
        chat: returns what writes conversations; called if there is one.
    """

    def __init__(self, lines: Lines, tokenizer: Tokenizer, chat: Callable[[], Chat]) -> None:
        super().__init__(lines, tokenizer, ChatSettings())
        self._lines = lines
        self._chat = cache(chat)

    def number(self, sample: int) -> int:
        """Return the number of a prompt's line in the file, from 1."""
        return self._lines.number(sample)

    def tokens(self, sample: int) -> Sequence[int]:
        """Return the ids of the text, or of a conversation up to where the next answer begins."""
        if self._record(sample).weight is not None:
            raise DataError(
                self.where(sample), expected="a prompt, of which nothing is learnt", got="one with 'weight'"
            )
        return super().tokens(sample)

    def _tokens_of(self, record: Record) -> ChatTokens:
        text = record.text if record.conversation is None else self._chat().open(record.conversation)
        return ChatTokens(ids=list(self._tokenizer.encode(text)), weights=None, ends=None)


def open_prompts(path: Path, tokenizer: Tokenizer, chat: Callable[[], Chat], *, where: str) -> PromptLines:
    """Return the prompts of a jsonl file: lines as the ``jsonl`` dataset has them; items lie in its folder.

    Args:
        path: of the file.
        tokenizer: of their texts.
        chat: returns what writes conversations; called if there is one.
        where: names the setting in errors.

    Raises:
        ConfigError: there is no such file, or nothing in it.
    """
    try:
        if not path.is_file():  # a named pipe would wait forever
            raise ConfigError(where, expected="an existing jsonl file", got=repr(str(path)))
        lines = find_lines(path)
    except OSError as error:
        raise ConfigError(where, expected="a readable jsonl file", got=f"{str(path)!r} ({error})") from error
    if not len(lines):
        raise ConfigError(where, expected="a jsonl file with at least one prompt", got=f"{str(path)!r}, which is empty")
    return PromptLines(lines, tokenizer, chat)
