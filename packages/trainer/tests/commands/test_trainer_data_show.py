"""`mimo data show`: a sample as the model sees it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mimo.trainer.commands.main import run

SETTINGS = """
[run]
name = "chat"
steps = 1
global_batch = 2
[data]
plugin = "jsonl"
path = "{folder}/train.jsonl"
max_tokens = 100
[data.chat]
template = "chatml"
[modules.language]
plugin = "decoder"
ranks = [0]
config = {{ hidden = 16, layers = 1, heads = 2, intermediate = 16 }}
"""
TURNS = [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes [1].\u001b[2J"}]


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Settings of a model that reads a conversation and a text."""
    lines = [{"messages": TURNS, "weight": 0.5}, {"text": "hello"}, {"messages": [*TURNS, *TURNS]}]
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    path = tmp_path / "chat.toml"
    path.write_text(SETTINGS.format(folder=tmp_path))
    return str(path)


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> list[list[str]]:
    """Return the words of each line that is printed."""
    assert run(["data", "show", *words]) == 0
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_trainer_data_show_marks_what_is_learnt(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With its weight; control characters of the data never reach the terminal."""
    first, _, *lines = shown(capsys, file)
    assert " ".join(first).startswith("sample 0 of 3, ")
    assert " ".join(first).endswith("train.jsonl:1: 78 tokens, 22 learnt, 0 items in 0 rows; sizes from headers")
    assert lines[0] == ["0-54", "read", "<|im_start|>user"]
    (learnt,) = (line for line in lines if "learnt" in line)
    assert learnt == ["55-76", "learnt", "0.5", "Yes", "[1].\\x1b[2J<|im_end|>"]


def test_trainer_data_show_of_a_text_and_its_ids(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All but the first token of a text is learnt; a conversation that is too long ends with a turn."""
    first, _, *lines = shown(capsys, file, "--sample", "1", "--count", "2", "--ids")
    assert first[-12:-3] == ["6", "tokens,", "5", "learnt,", "0", "items", "in", "0", "rows;"]
    assert lines[:2] == [["0", "read", "h", "104"], ["1-5", "learnt", "1", "ello", "101", "108", "108", "111", "256"]]
    assert " ".join(lines[2]).endswith(
        "78 tokens, 22 learnt, 0 items in 0 rows, cut at data.max_tokens = 100; sizes from headers"
    )


def test_trainer_data_show_refuses_numbers_that_are_none(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As any wrong word of a command."""
    assert run(["data", "show", file, "--sample", "2", "--count", "2"]) == 2
    assert capsys.readouterr().err == "mimo: --sample: expected numbers from 0 to 2, got 2 to 3.\n"
    assert run(["data", "show", file, "--evaluation"]) == 2
    assert capsys.readouterr().err == "mimo: data: expected held-out samples, got none.\n"
