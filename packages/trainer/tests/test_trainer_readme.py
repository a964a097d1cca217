"""What the README shows first works as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TEXT = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_trainer_readme_settings_are_checked(tmp_path: Path) -> None:
    """Its settings and a line of data are all that `mimo check` needs."""
    settings, *_ = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "text.toml").write_text(settings, encoding="utf-8")
    (line,) = re.findall(r"lines such as `(.*?)`", TEXT)
    (tmp_path / "train.jsonl").write_text(f"{line}\n" * 8, encoding="utf-8")
    assert "mimo check text.toml" in TEXT
    words = [sys.executable, "-m", "mimo.trainer", "check", "text.toml"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)  # noqa: S603 - own text
    assert done.returncode == 0, done.stderr
    assert "language" in done.stdout
