"""The README's example runs as it stands."""

from __future__ import annotations

import math
import re
import statistics
import subprocess
import sys
from pathlib import Path


def test_readme_example() -> None:
    """A decoder in one process prints a loss for each label, log(10) or so on average."""
    text = (Path(__file__).parents[1] / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)  # noqa: S603
    assert done.returncode == 0, done.stderr
    losses = [float(number) for number in re.findall(r"\d\.\d+", done.stdout.split("]")[0])]
    assert [loss > 0 for loss in losses] == [True, True, False, True, False]
    assert abs(statistics.mean(filter(None, losses)) - math.log(10)) < 0.5
