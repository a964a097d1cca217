"""The README's program runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TEXT = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_testing_readme_program() -> None:
    """It prints what its comment says."""
    (program,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)  # noqa: S603 - own text
    assert done.stdout.splitlines() == re.findall(r"^print.*  # (.*)$", program, re.MULTILINE), done.stderr
