"""`mimo data show`: a sample as the model sees it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import attrs
import pytest
from PIL import Image
from rich.console import Console

from mimo.data import DATASETS
from mimo.model import EncoderSpec, GeneratorSpec, Reads
from mimo.trainer.commands.main import run
from mimo.trainer.commands.tables.sample import show_sample
from mimo.trainer.config.plugin_kinds import find_installed
from mimo.trainer.config.toml import read_settings
from mimo.trainer.resolving.resolve import resolve

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
DRAWS = """
[modules.vision]
plugin = "eye"
ranks = [0]
[modules.drawer]
plugin = "pen"
fed_by = "language"
ranks = [0]
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
    assert lines[:2] == [
        ["0", "read", "h", "104"],
        ["1-5", "learnt", "1", "ello[end]", "101", "108", "108", "111", "256"],
    ]
    assert " ".join(lines[2]).endswith(
        "78 tokens, 22 learnt, 0 items in 0 rows, cut at data.max_tokens = 100; sizes from headers"
    )


@attrs.frozen(kw_only=True)
class NoConfig:
    pass


def _unused(*_arguments: Any) -> Any:
    raise AssertionError(_arguments)


def _measure(picture: Image.Image) -> tuple[int, int]:
    return picture.height, picture.width


EYE = EncoderSpec(
    name="eye",
    config=NoConfig,
    measure=_measure,
    rows=lambda _config, size: size[0] // 2,
    prepare=_unused,
    build=_unused,
    parts={"all": ("all",)},
)


def drawn(folder: Path, text: str, role: str, *, rows: int = 1, reads: Reads = "before") -> list[tuple[str, str]]:
    """Return the lines on a sample of a model that reads pictures and makes them, each behind its first colour."""
    pen = GeneratorSpec(
        name="pen",
        config=NoConfig,
        measure=_measure,
        targets=_unused,
        prepare=_unused,
        build=_unused,
        parts={"all": ("all",)},
        rows=lambda _config: rows,
        reads=lambda _config: reads,
    )

    def find(kind: Any, name: str, where: str) -> Any:
        return {"eye": EYE, "pen": pen}.get(name) or find_installed(kind, name, where)

    Image.new("L", (8, 8)).save(folder / "a.png")
    record = {"text": text, "images": ["a.png"], "roles": {"image": [role]}, "weight": 0.5}
    (folder / "train.jsonl").write_text(f"{json.dumps(record)}\n")
    path = folder / "draw.toml"
    path.write_text((SETTINGS + DRAWS).format(folder=folder))
    job = resolve(read_settings(path), find=find, purpose="import")
    dataset = find(DATASETS, "jsonl", "")
    console = Console(force_terminal=True, color_system="standard", width=200)
    train = dataset.open(dataset.config(path=str(folder / "train.jsonl")), job.tokenizer, "train")
    with console.capture() as shown:
        for part in show_sample(job, train, 0, ids=False):
            console.print(part)
    colour = re.compile(r"\x1b\[([0-9;]*)m")
    lines = shown.get().splitlines()
    return [("".join(colour.findall(line)[:1]), " ".join(colour.sub("", line).split())) for line in lines]


READ, LEARNT, ITEM = "", "1;32", "36"
"""Colours."""


def test_trainer_data_show_of_an_item_that_is_made(tmp_path: Path) -> None:
    """Its line says from which tokens it is made, and is learnt with all rows of its placeholder."""
    (_, first), _, *lines = drawn(tmp_path, "ab<image>c", "output", rows=3)
    assert "7 tokens, 4 learnt, 1 items in 0 rows, 1 of them made; sizes" in first
    assert lines == [
        (READ, "0 read a"),
        (LEARNT, "1 learnt 0.5 b"),
        (LEARNT, "2-4 image 0.5 8 x 8: made from 0-1"),
        (LEARNT, "5-6 learnt 0.5 c[end]"),
    ]
    _, _, first_line, *_ = drawn(tmp_path, "<image>c", "output")
    assert first_line == (ITEM, "0 image 8 x 8: made from nothing")


def test_trainer_data_show_of_items_that_are_read(tmp_path: Path) -> None:
    """They have rows, which nobody learns; one that is both has what calls for it first, here what it is made from."""
    (_, first), _, *lines = drawn(tmp_path, "a<image>", "input", rows=2, reads="own")
    assert "6 tokens, 1 learnt, 1 items in 4 rows; sizes" in first
    assert lines == [(READ, "0 read a"), (ITEM, "1-4 image 8 x 8: 4 rows"), (LEARNT, "5 learnt 0.5 [end]")]
    (_, first), _, *lines = drawn(tmp_path, "a<image>", "both", rows=2, reads="own")
    assert "8 tokens, 2 learnt, 1 items in 4 rows, 1 of them made; sizes" in first
    assert lines == [
        (READ, "0 read a"),
        (LEARNT, "1-2 image 0.5 8 x 8: made from 1-2"),
        (ITEM, "3-6 image 8 x 8: 4 rows"),
        (LEARNT, "7 learnt 0.5 [end]"),
    ]


def test_trainer_data_show_passes_over_samples_that_cannot_be_read(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is named at its place, all others are shown, as many as there are, and the command ends with 3."""
    with (tmp_path / "train.jsonl").open("a") as lines:
        lines.write('{"texd": "a"}\n[]\n{"text": "b"}\n')
    assert run(["data", "show", file, "--sample", "1", "--count", "9"]) == 3
    printed = capsys.readouterr()
    heads = [line for line in printed.out.splitlines() if line.startswith("sample ")]
    assert [head.split(",")[0] for head in heads] == [f"sample {number} of 6" for number in range(1, 6)]
    assert "train.jsonl:4: expected only the keys" in heads[2]
    assert heads[3].endswith("train.jsonl:5: expected one JSON object, got a list [].")
    assert "train.jsonl:4: expected only the keys" in printed.err


def test_trainer_data_show_refuses_numbers_that_are_none(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As any wrong word of a command."""
    assert run(["data", "show", file, "--sample", "3", "--count", "2"]) == 2
    assert capsys.readouterr().err == "mimo: --sample: expected a number from 0 to 2, got 3.\n"
    assert run(["data", "show", file, "--evaluation"]) == 2
    assert capsys.readouterr().err == "mimo: data: expected held-out samples, got none.\n"
