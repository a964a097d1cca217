"""The page on writing a schedule, followed literally: its files, its package, its test, its commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import losses, succeed
from house import ROOT
from written import build, commands_of, files_of

PAGE = (ROOT / "docs" / "write-a-schedule.md").read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the page's files."""
    for name, content in files_of(PAGE).items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    return tmp_path


def test_the_pages_schedule_is_proved_simulated_and_trains(folder: Path) -> None:
    """Its package is found, its plan is drawn, and a run has the losses of another schedule."""
    assert set(files_of(PAGE)) == {"pyproject.toml", "mimo_schedule_waves.py", "test_waves.py", "waves.toml"}
    site = build(folder)
    printed = {}
    for words in commands_of(PAGE):
        short = ["run.steps=2"] if words[0] == "train" else []
        printed[words[0]] = succeed(*words, *short, cwd=folder, path=site)
    assert list(printed) == ["plugins", "check", "simulate", "train"]
    assert "mimo-schedule-waves" in printed["plugins"]
    assert "B0 B1 F2" in printed["check"].replace(" s0", "").replace(" r2", "").replace(" s1", "").replace(" r3", "")
    assert "waves, 4 microbatches" in printed["simulate"]
    assert (folder / "timeline.html").exists()
    other = ("schedule={plugin='1f1b'}", "run.directory=other")
    succeed("train", "waves.toml", "run.steps=2", *other, cwd=folder, path=site)
    assert losses(folder / "runs" / "waves") == pytest.approx(losses(folder / "other"), rel=1e-6)


def test_the_pages_test_passes(folder: Path) -> None:
    """As printed."""
    environment = {**os.environ, "PYTHONPATH": str(build(folder))}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_waves.py"]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout
