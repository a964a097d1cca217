"""The README's program runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


def test_topology_readme_program(capsys: pytest.CaptureFixture[str]) -> None:
    """It prints the edges, the modules of a rank and a lane's samples."""
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(program, "README.md", "exec"), {})  # noqa: S102 - the README is ours
    edges, places, samples = capsys.readouterr().out.splitlines()
    assert edges == "['vision->language', 'language.0-1']"
    assert re.findall(r"'(\w+)': Coordinates", places) == ["vision", "language"]
    assert samples == "range(0, 2)"
