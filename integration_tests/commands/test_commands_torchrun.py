"""The command under torchrun: it joins the processes that were started instead of starting some."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from commands import TEXT, TORCHRUN, install, losses, mimo, places, start, torchrun

FAILS_TWICE = """
import os, signal
from mimo.hooks import hookimpl

@hookimpl
def mimo_step_end(run, info):
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if attempt == "0":
        raise RuntimeError("the first attempt is not the last")
    if attempt == "1" and info.step == 3 and run.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""

ASKS_FOR_A_RESTART = """
from mimo.hooks import RestartNeededError, hookimpl

@hookimpl
def mimo_step_end(run, info):
    raise RestartNeededError("step 1", expected="a device that computes", got="one that doesn't")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model that reads text alone, on two processes."""
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": f"line {n}"}) + "\n" for n in range(4)))
    (tmp_path / "text.toml").write_text(TEXT.replace('ranks = "0"', 'ranks = "0-1"'))
    return tmp_path


def test_another_world_than_torchruns_is_refused(tmp_path: Path) -> None:
    """Every process refuses it, and one prints the reason."""
    words = ("train", "examples/digits.toml", f"run.directory={tmp_path / 'run'}")
    ended = [mimo(*words, environ={**place, "LOCAL_RANK": place["RANK"]}) for place in places(2)]
    assert [one.code for one in ended] == [2, 2]
    assert ended[0].refused("run.world: expected 2, the number of processes that were started, got 4.")
    assert not ended[1].err
    assert not (tmp_path / "run").exists()


def test_a_restarted_attempt_resumes_where_the_last_one_left(folder: Path) -> None:
    """Whatever ended that, and also where nothing was saved: the command is the same, and asks for nothing."""
    path = install(folder / "site", "fails_twice", FAILS_TWICE, "mimo.lifecycle")
    ended = torchrun(2, "train", "text.toml", restarts=2, cwd=folder, path=path)
    assert ended.code == 0, ended.err
    assert "RuntimeError: the first attempt is not the last" in ended.err
    assert ended.out.count("text: 4 steps with 2 processes") == 2
    assert "rank 1 no longer answers: it was killed or stopped" in ended.err
    assert ended.out.count("text: step 3 to 4 with 2 processes") == 1
    assert len(losses(folder / "run")) == 4
    assert not (folder / "run" / "error.txt").exists()


@pytest.mark.soak
def test_what_a_restart_cannot_help_is_not_begun_again(folder: Path) -> None:
    """With code 16 or 17 a run has been saved for somebody to look at: torchrun would restart it anyway."""
    path = install(folder / "site", "asks", ASKS_FOR_A_RESTART, "mimo.lifecycle")
    program = (*TORCHRUN, "--nproc-per-node=2", "--max-restarts=1", "-m", "mimo.trainer")
    ended = mimo("train", "text.toml", program=program, cwd=folder, path=path)
    assert ended.code != 0
    reason = "rank [01]: step 1: expected a device that computes, got one that doesn't.\n"
    assert ended.out.count("text: 4 steps with 2 processes") == 1
    message = "mimo: not begun again: expected a last attempt that a restart can help, got one that ended with 16:\n"
    assert len(re.findall(f"{message}{reason}", ended.err)) == 1
    assert re.fullmatch(reason, (folder / "run" / "error.txt").read_text())


def test_the_reason_of_a_failed_rank_is_in_the_run_directory(folder: Path) -> None:
    """Since torchrun's own summary only counts processes."""
    (folder / "train.jsonl").write_text('{"text": "fine"}\n{"texd": "not"}\n')
    keys = "'images', 'audio', 'id', 'items', 'messages', 'roles', 'text', 'tools', 'weight'"
    reason = f"train.jsonl:2: expected only the keys {keys}, got 'texd'. Did you mean 'text'?\n"
    one, other = places(2)
    with (
        start("train", "text.toml", cwd=folder, environ=one) as first,
        start("train", "text.toml", cwd=folder, environ=other) as second,
    ):
        ended = first.wait(), second.wait()
    assert [one.code for one in ended] == [3, 3]
    assert sum(one.err.count(reason) for one in ended) == 1
    waited = r"(rank [01] waited .* for rank [01] \(.*\)\n)?"  # where the other one has come to that
    assert re.fullmatch(f"{waited}rank [01]: {re.escape(reason)}", (folder / "run" / "error.txt").read_text())


def test_a_signal_to_one_rank_stops_all(folder: Path) -> None:
    """Where each was started by itself, a cluster may signal one alone; all save the same step."""
    one, other = places(2)
    words = ("train", "text.toml", "run.steps=1000000", "logging.interval=1", "checkpoint.interval=0")
    with (
        start(*words, cwd=folder, environ=one) as first,
        start(*words, cwd=folder, environ=other) as second,
    ):
        first.wait_for(" 2/1000000  loss")
        for _ in range(2):  # the same signal twice, as a process and its group may get it
            second.process.terminate()
        ended = first.wait(), second.wait()
    assert [(one.code, one.err) for one in ended] == [(0, "")] * 2
    assert f"text: stopped as asked, step {len(losses(folder / 'run'))} of 1000000 is saved, in " in ended[0].out
