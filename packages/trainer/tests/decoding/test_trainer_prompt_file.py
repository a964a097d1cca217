"""Answers go out in the order of their prompts, to a file that is there complete or not at all."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from mimo.hooks import ConfigError, RunError
from mimo.trainer.decoding.decode import _kept
from mimo.trainer.decoding.prompt_file import AnswerLines, new_file
from mimo.trainer.decoding.running import Answer


def test_answers_wait_for_those_before_them() -> None:
    """Whatever ends first; the line of each prompt is named."""
    lines: list[str] = []
    out = AnswerLines(lines.append, lambda number: 10 + number)
    counts = []
    for number in (1, 2, 0, 4, 3):
        out.add(Answer(number=number, text=f"ü{number}", tokens=number, ended="end" if number else "max_tokens"))
        counts.append(len(lines))
    assert counts == [0, 0, 3, 3, 5]
    assert [json.loads(line) for line in lines[:2]] == [
        {"prompt": 10, "text": "ü0", "tokens": 0, "ended": "max_tokens"},
        {"prompt": 11, "text": "ü1", "tokens": 1, "ended": "end"},
    ]


def test_a_file_is_there_when_it_is_complete(tmp_path: Path) -> None:
    """Nothing is left of one that failed, and nothing that was there is written over."""
    path = tmp_path / "answers.jsonl"
    with contextlib.suppress(ZeroDivisionError), new_file(path) as write:
        write("a\n")
        assert [file.name[:8] for file in tmp_path.iterdir()] == [".answers"]
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
    with new_file(path) as write:
        write("a\n")
    assert path.read_text() == "a\n"
    with pytest.raises(ConfigError, match="--out: expected a file that is not there yet"), new_file(path) as write:
        write("b\n")
    assert path.read_text() == "a\n"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(RunError, match="--out: expected a file that can be written"), new_file(tmp_path / "x" / "y"):
        pass


@pytest.mark.parametrize(
    ("stays", "kept"),
    [
        ("1111", [0, 1, 2, 3]),
        ("0111", [3, 1, 2]),
        ("1010", [0, 2]),
        ("0011", [2, 3]),
        ("0000", []),
        ("1110", [0, 1, 2]),
    ],
)
def test_few_sequences_move_where_one_ends(stays: str, kept: list[int]) -> None:
    """The last takes its place."""
    assert _kept([letter == "1" for letter in stays]) == kept
