"""The command under torchrun: it joins the processes that were started instead of starting some."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import install, losses, torchrun

FAILS_ONCE = """
import os
from mimo.hooks import hookimpl

@hookimpl
def mimo_step_end(run, info):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise RuntimeError("the first attempt is not the last")
"""

TEXT = """
[run]
name = "text"
steps = 2
global_batch = 4
directory = "run"
[data]
plugin = "jsonl"
path = "train.jsonl"
[checkpoint]
load = "latest"
[modules.language]
plugin = "decoder"
ranks = "0"
config = { hidden = 16, layers = 1, heads = 2, intermediate = 16 }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model that reads text alone, on one process."""
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": f"line {n}"}) + "\n" for n in range(4)))
    (tmp_path / "text.toml").write_text(TEXT)
    return tmp_path


def test_another_world_than_torchruns_is_refused(tmp_path: Path) -> None:
    """By every process, told by one."""
    ended = torchrun(2, "train", "examples/digits.toml", f"run.directory={tmp_path / 'run'}")
    assert ended.code != 0
    assert ended.err.count("mimo: run.world: expected 2, the number of processes that were started, got 4.") == 1
    assert not (tmp_path / "run").exists()


def test_a_restarted_attempt_begins_where_the_last_one_left(folder: Path) -> None:
    """Also where that was before the first checkpoint, or where nothing had begun: the command is the same."""
    path = install(folder / "site", "fails_once", FAILS_ONCE, "mimo.lifecycle")
    ended = torchrun(1, "train", "text.toml", options=("--max-restarts=1",), cwd=folder, path=path)
    assert ended.code == 0, ended.err
    assert "RuntimeError: the first attempt is not the last" in ended.err
    assert ended.out.count("text: no checkpoint yet, so all 2 steps with 1 processes") == 2
    assert len(losses(folder / "run")) == 2
    assert not (folder / "run" / "error.txt").exists()


def test_the_reason_of_a_failed_rank_is_in_the_run_directory(folder: Path) -> None:
    """Since torchrun's own summary only counts processes."""
    (folder / "train.jsonl").write_text('{"text": "fine"}\n{"texd": "not"}\n')
    ended = torchrun(1, "train", "text.toml", cwd=folder)
    reason = "rank 0: train.jsonl:2: expected only the keys 'images' and 'text', got 'texd'. Did you mean 'text'?\n"
    assert ended.code != 0
    assert ended.err.count(f"mimo: {reason}") == 1
    assert (folder / "run" / "error.txt").read_text() == reason
