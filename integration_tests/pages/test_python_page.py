"""The programs that docs/python.md shows, run as they stand there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from commands import TORCHRUN
from house import ROOT

from mimo.testing import start

PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
(SETTINGS,) = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
(LINE,) = re.findall(r"lines such as `(.*?)`", PAGE)
*CELLS, LOOP = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the page says that a reader has."""
    (tmp_path / "my.toml").write_text(SETTINGS, encoding="utf-8")
    for name in ("train.jsonl", "held-out.jsonl"):
        (tmp_path / name).write_text(f"{LINE}\n" * 8, encoding="utf-8")
    return tmp_path


def test_the_page_of_python_runs_as_a_notebook(folder: Path) -> None:
    """Cell by cell in one interpreter without a main file: runs of ten and then twenty steps, and a loop of five."""
    with start("\n".join(CELLS), program=(sys.executable, "-c"), cwd=folder) as started:
        lines = started.wait().printed.splitlines()
    assert any(re.fullmatch(r"runs/text 10 \d+\.\d+", line) for line in lines), lines
    assert "20" in lines
    assert any(re.fullmatch(r"20 \d+\.\d+ [01]\.\d+ 8", line) for line in lines), lines
    assert [line.split()[0] for line in lines if re.fullmatch(r"\d \d+\.\d+ \d+\.\d+", line)] == list("12345")


def test_the_page_of_python_trains_in_a_group_that_exists(folder: Path) -> None:
    """With the command that the page gives, two ranks on one machine."""
    assert "`torchrun --nproc-per-node 2 loop.py`" in PAGE
    (folder / "loop.py").write_text(LOOP, encoding="utf-8")
    with start("--nproc-per-node", "2", "loop.py", program=TORCHRUN, cwd=folder) as started:
        ended = started.wait()
    assert ended.code == 0, ended
    assert [line.split()[0] for line in ended.out.splitlines()] == list("123")
