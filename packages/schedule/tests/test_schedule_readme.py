"""The README's example runs as it stands."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest


def test_the_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints one line an actor, what each stage keeps in flight, and the simulated seconds."""
    readme = Path(__file__).parents[1] / "README.md"
    (example,) = re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), flags=re.DOTALL)
    program = tmp_path / "example.py"
    program.write_text(example, encoding="utf-8")
    runpy.run_path(str(program))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(")")[0] for line in lines[:3]] == ["(0, 1", "(2,", "(3,"]
    assert "StageId(module='vision', stage=0): 3" in lines[3]
    assert lines[4] == "15"
