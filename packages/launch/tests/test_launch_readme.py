"""The README's program runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TEXT = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_launch_readme_program(tmp_path: Path) -> None:
    """Three processes add up their ranks, and it ends with 0."""
    (program,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    words = [sys.executable, "program.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)  # noqa: S603 - own text
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == re.findall(r"  # (3 ranks .*)$", program, re.MULTILINE)
