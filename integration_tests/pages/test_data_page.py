"""The page of data: its mixture is checked as it says, and read with other weights once a run is resumed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commands import here, mimo, write_lines
from house import ROOT

PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
(MIXTURE,) = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
(CHECKED,) = re.findall(r"^```\n(data .*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
(RESUMED,) = re.findall(r"`(samples from step 501 on: [^`]*)`", PAGE)
RUN = """
[run]
name = "mixed"
steps = 1000
global_batch = 64
micro_batch = 64
evaluation_interval = 0
directory = "run"
[modules.language]
plugin = "decoder"
ranks = "0"
config = { hidden = 16, layers = 1, heads = 2, intermediate = 16 }
"""
RESUME = ("checkpoint.load=latest", "run.steps=3")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with sources of the page's sizes, and its settings for 1,000 steps."""
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    for name, count in {"captions": 40_000, "chats": 12_000, "held_out": 500}.items():
        write_lines(tmp_path / f"{name}.jsonl", [{"text": "so"} if name == "captions" else {"messages": turns}] * count)
    (tmp_path / "mixed.toml").write_text(MIXTURE + RUN, encoding="utf-8")
    return tmp_path


def test_the_page_of_data_shows_what_a_mixture_is_read_as(folder: Path) -> None:
    """How much of a run comes from each source, and how often it is read."""
    lines = [line.rstrip() for line in here("check", "mixed.toml", cwd=folder).printed.splitlines()]
    begin = lines.index(CHECKED.splitlines()[0])
    assert lines[begin : begin + 3] == CHECKED.splitlines()


def test_the_page_of_data_resumes_with_other_weights(folder: Path) -> None:
    """They hold from the first step on, which a check says as well; other sources are refused."""
    assert mimo("train", "mixed.toml", "run.steps=2", cwd=folder).code == 0
    weights = [f"data.sources.{name}.weight={share}" for name, share in re.findall(r"(\w+) (\d+)%", RESUMED)]
    assert len(weights) == 2
    said = RESUMED.replace("501", "3")
    same = here(
        "check", "mixed.toml", *RESUME, "data.sources.captions.weight=20", "data.sources.chats.weight=10", cwd=folder
    )
    assert "samples from step" not in same.printed
    assert said in here("check", "mixed.toml", *RESUME, *weights, cwd=folder).printed
    ended = mimo("train", "mixed.toml", *RESUME, *weights, cwd=folder)
    assert ended.code == 0, ended
    assert said in ended.out
    other = here("check", "mixed.toml", *RESUME, "data.sources.chats.path=held_out.jsonl", cwd=folder)
    assert other.code == 2
    assert "load.data = false" in other.err
