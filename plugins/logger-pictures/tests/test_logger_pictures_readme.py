"""The README's program runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


def test_logger_pictures_readme_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It draws the curve of metrics that it writes."""
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(program, {})  # noqa: S102 -- our own page
    assert (tmp_path / "loss.png").is_file()
