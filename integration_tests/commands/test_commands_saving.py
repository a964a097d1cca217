"""Saving in whole runs: a disk that fills up, checkpoints beside training, and settings that contradict each other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from commands import DIGITS, TEXT, here, install, losses, mimo, succeed, write_lines

from mimo.checkpoint import read_manifest, verify

WORDS = (*DIGITS, "checkpoint.keep=0")

FILLS_THE_DISK = """
from mimo.hooks import hookimpl

@hookimpl
def mimo_step_begin(run, step):
    filler = run.directory.parent / "filler"
    if step == 2:
        with filler.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(1 << 12)):
                    pass
            except OSError:
                pass
    if step == 4:
        filler.unlink()
"""
"""From the second step to the fourth, nothing more goes onto the disk."""

IS_BUSY_UNTIL_A_SAVE_IS_SKIPPED = """
import os, threading
from mimo.hooks import hookimpl

skipped, fsync = threading.Event(), os.fsync

def wait_and_sync(number):
    skipped.wait(60)
    fsync(number)

@hookimpl
def mimo_run_begin(run):
    os.fsync = wait_and_sync

@hookimpl
def mimo_save_failed(run, step, error):
    skipped.set()
"""

FAILS_AT_THE_END = """
from mimo.hooks import hookimpl

@hookimpl
def mimo_run_end(run):
    raise KeyError("loss")
"""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder with a model that reads text alone."""
    write_lines(tmp_path / "train.jsonl", [{"text": f"line {number}"} for number in range(9)])
    (tmp_path / "text.toml").write_text(TEXT)
    return tmp_path


ONE = ("modules.vision.ranks=0", "modules.language.ranks=0", "modules.language.tp=1")


@pytest.mark.parametrize("more", [("checkpoint.asynchronous=true",), ("checkpoint.asynchronous=false", *ONE)])
def test_a_run_continues_when_its_disk_is_full(small_disk: Path, more: tuple[str, ...]) -> None:
    """One checkpoint of 2 MB fits. The next fails and training continues; the last one is the result: code 3."""
    run = small_disk / "run"
    ended = mimo(*WORDS, *more, "run.steps=6", "checkpoint.interval=2", f"run.directory={run}")
    assert ended.code == 3
    assert "step_00000006: expected" in ended.err
    assert "bytes free on its disk, got" in ended.err
    assert "Older checkpoints are whole. Make room, or look at the disk." in ended.err
    assert (run / "error.txt").read_text() in ended.err
    printed = [line for line in ended.out.splitlines() if "not saved" in line]
    assert len(printed) == 1
    assert re.match(rf"checkpoint not saved, going on after step [{'4' if ONE[0] in more else '56'}]: ", printed[0])
    assert f"{run / 'checkpoints' / 'step_00000004'}: expected" in printed[0]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line and "evaluation" not in line] == [1, 2, 3, 4, 5, 6]
    assert [line["reason"] for line in lines if line.get("save_failed")] == [printed[0].partition(": ")[2]]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["latest", "step_00000002"]
    verify(run / "checkpoints" / "step_00000002")


def test_a_disk_that_was_full_for_a_while_ends_no_run_and_no_resume(text: Path, small_disk: Path) -> None:
    """The saves that failed are known by their lines, without a loss, which break no picture then or later."""
    path = install(text / "site", "fills", FILLS_THE_DISK, "mimo.lifecycle")
    run = small_disk / "run"
    words = ("train", "text.toml", f"run.directory={run}", "run.evaluation_interval=0")
    ended = mimo(*words, "run.steps=5", cwd=text, path=path)
    assert ended.code == 0, ended
    assert "text: done in" in ended.out
    assert [line.split(":")[0] for line in ended.out.splitlines() if "not saved" in line] == [
        f"checkpoint not saved, going on after step {step}" for step in (2, 3)
    ]
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if line.get("save_failed")] == [2, 3]
    assert (run / "loss.png").is_file()
    assert sorted(path.name for path in (run / "checkpoints").glob("step_*")) == [
        f"step_0000000{step}" for step in (1, 4, 5)
    ]
    (run / "loss.png").unlink()
    assert "text: step 6 to 7" in succeed(*words, "run.steps=7", "checkpoint.load=latest", cwd=text)
    assert (run / "loss.png").is_file()


def test_a_save_that_was_skipped_ends_no_run_and_no_resume(text: Path) -> None:
    """Neither does the line that says so."""
    path = install(text / "site", "busy", IS_BUSY_UNTIL_A_SAVE_IS_SKIPPED, "mimo.lifecycle")
    words = ("train", "text.toml", "checkpoint.asynchronous=true", "checkpoint.when_busy=skip")
    assert "text: done in" in succeed(*words, cwd=text, path=path)
    lines = [json.loads(line) for line in (text / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {"step": 2, "save_skipped": True} in lines
    assert (text / "run" / "loss.png").is_file()
    succeed(*words, "run.steps=5", "checkpoint.load=latest", cwd=text)
    assert len(losses(text / "run")) == 5


def test_a_plugin_that_fails_at_the_end_is_reported_once_and_changes_nothing(text: Path) -> None:
    """On whichever ranks it fails: all that the run was for is there by then, and others' ends are heard."""
    path = install(text / "site", "fails", FAILS_AT_THE_END, "mimo.lifecycle")
    ended = mimo("train", "text.toml", "modules.language.ranks=0-1", cwd=text, path=path)
    assert ended.code == 0, ended
    assert "text: done in" in ended.out
    printed = "(entry point mimo.lifecycle: fails), mimo_run_end: expected no exception, got KeyError: 'loss'. "
    assert ended.err.count("mimo: ") == ended.err.count(printed) == ended.err.count("Traceback") == 1, ended.err
    assert not (text / "run" / "error.txt").exists()
    assert (text / "run" / "loss.png").is_file()


@pytest.mark.soak
def test_each_checkpoint_of_a_run_is_its_steps(tmp_path: Path) -> None:
    """Saved beside training or before it continues, with one plan or many, files are equal to the bit."""
    found = []
    for index, more in enumerate(
        (
            ("checkpoint.asynchronous=true",),
            ("checkpoint.asynchronous=false", "checkpoint.assume_constant_structure=false"),
        )
    ):
        run = tmp_path / str(index)
        succeed(*WORDS, *more, "run.steps=4", "checkpoint.interval=1", f"run.directory={run}")
        steps = sorted((run / "checkpoints").glob("step_*"))
        assert [read_manifest(step).step for step in steps] == [1, 2, 3, 4]
        found.append([{path.name: path.read_bytes() for path in step.glob("*.safetensors")} for step in steps])
    assert found[0] == found[1]
    assert len({tuple(step.values()) for step in found[0]}) == 4


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ("checkpoint.keep_every=5", "checkpoint.keep=0"),
            "checkpoint.keep_every: expected 0 where keep is 0, which keeps all, got 5.",
        ),
        (
            ("checkpoint.when_busy=skip", "checkpoint.asynchronous=false"),
            'checkpoint.when_busy: expected "wait" where asynchronous is false, since nothing is written beside',
        ),
        (("checkpoint.when_busy=never",), "checkpoint.when_busy: expected"),
    ],
)
def test_settings_that_mean_nothing_are_refused(words: tuple[str, ...], text: str) -> None:
    """Nothing is accepted and ignored."""
    assert here("check", "examples/digits.toml", *words).refused(text)
