"""A file of prompts in, and a file of answers out: a line each, in the same order."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import attrs

from mimo.data import PromptLines, open_prompts
from mimo.hooks import ConfigError, RunError
from mimo.model import EncoderSpec
from mimo.trainer.decoding.made_files import MadeFiles
from mimo.trainer.decoding.prompt import chat_of, lay_out_prompt
from mimo.trainer.decoding.running import Answer, Question
from mimo.trainer.job.job import Job
from mimo.trainer.job.measured_dataset import MeasuredDataset


@attrs.frozen(kw_only=True, eq=False)
class PromptFile:
    """The prompts of a jsonl file, for a job's model.

    Args:
        job: of the model.
        lines: of the file.
    """

    job: Job
    lines: PromptLines

    @classmethod
    def of(cls, job: Job, path: Path) -> PromptFile:
        """Return the prompts of a file.

        Raises:
            ConfigError: there is no such file, or nothing in it.
        """
        chat = partial(chat_of, job, "--prompts", 'Write {"text": ...} lines, as the template would.')
        return cls(job=job, lines=open_prompts(path, job.tokenizer, chat, where="--prompts"))

    def questions(self) -> Iterator[Question]:
        """Yield the prompts, laid out.

        Raises:
            UserError: one is broken or does not fit; file and line are named.
        """
        encoders = {
            module.modality: module.spec
            for module in self.job.encoders_of(self.job.language)
            if isinstance(module.spec, EncoderSpec) and module.modality is not None
        }
        dataset = MeasuredDataset(self.lines, encoders)
        for number in range(len(self.lines)):
            yield Question(number=number, dataset=dataset, layout=lay_out_prompt(self.job, dataset, number))


@attrs.define
class AnswerLines:
    """Answers as lines of JSON, in the order of their prompts: each is written when all before it are.

    Args:
        write: takes a line.
        number: returns the number of a prompt's line, from 1.
        files: writes what is made beside text; None of a model that makes nothing.
    """

    write: Callable[[str], None]
    number: Callable[[int], int]
    files: MadeFiles | None = None
    _waiting: dict[int, Answer] = attrs.field(factory=dict, init=False)
    _next: int = attrs.field(default=0, init=False)

    def add(self, answer: Answer) -> None:
        """Take an answer."""
        self._waiting[answer.number] = answer
        while self._next in self._waiting:
            found = self._waiting.pop(self._next)
            self._next += 1
            line = {"prompt": self.number(found.number), "text": found.text, "tokens": found.tokens}
            made = {} if self.files is None else {"items": [str(file) for file in self.files.add(found)]}
            self.write(json.dumps({**line, "ended": found.ended, **made}) + "\n")


def check_out(path: Path) -> None:
    """Refuse a file of answers that is there already, or whose folder is not.

    Raises:
        ConfigError: see above.
    """
    if path.exists() or path.is_symlink():
        raise ConfigError(
            "--out", expected="a file that is not there yet", got=repr(str(path)), fix="Name another, or move it."
        )
    if not path.parent.is_dir():
        raise ConfigError("--out", expected="a file in an existing folder", got=repr(str(path)))


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Callable[[str], None]]:
    """Yield what writes text to a file that is there, complete, when the context ends well, and else not at all.

    Raises:
        ConfigError: somebody else has made a file of that name.
        RunError: it can't be written.
    """
    partial_path = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with partial_path.open("w", encoding="utf-8") as file:
            yield lambda text: _write(file.write, text, path)
            file.flush()
            os.fsync(file.fileno())
        check_out(path)
        partial_path.rename(path)
    except OSError as error:
        raise RunError("--out", expected="a file that can be written", got=f"{str(path)!r} ({error})") from error
    finally:
        partial_path.unlink(missing_ok=True)


def _write(write: Callable[[str], int], text: str, path: Path) -> None:
    try:
        write(text)
    except OSError as error:
        raise RunError("--out", expected="a file that can be written", got=f"{str(path)!r} ({error})") from error
