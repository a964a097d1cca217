"""The README's programs run as printed."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def _run(number: int, folder: Path) -> None:
    program = folder / "example.py"
    program.write_text(re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)[number], encoding="utf-8")
    runpy.run_path(str(program))


def test_the_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints one line an actor, what each stage keeps in flight, and the simulated seconds."""
    _run(0, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(")")[0] for line in lines[:3]] == ["(0, 1", "(2,", "(3,"]
    assert "StageId(module='vision', stage=0): 3" in lines[3]
    assert lines[4] == "15"


def test_a_pipeline_of_ones_own_is_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each schedule has its time and its memory, and all are drawn on one page."""
    monkeypatch.chdir(tmp_path)
    _run(1, tmp_path)
    results = [re.fullmatch(r"(\S+): (\d+) ms, up to (\d+) MiB", line) for line in capsys.readouterr().out.splitlines()]
    seconds = {found[1]: int(found[2]) for found in results if found}
    memory = {found[1]: int(found[3]) for found in results if found}
    assert seconds["ahead"] <= seconds["zero-bubble"] < seconds["gpipe"] <= seconds["1f1b"]
    assert (memory["1f1b"], memory["gpipe"]) == (4 * 400, 8 * 400)
    assert (tmp_path / "schedules.html").exists()
