"""Packages that a page has its reader write: their files, and a folder in which they are installed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from zipfile import ZipFile


def files_of(page: str) -> Mapping[str, str]:
    """Return the files of a page: blocks below their name."""
    return dict(re.findall(r"^`([\w.-]+)`\n\n```\w+\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))


def commands_of(page: str) -> list[list[str]]:
    """Return the words of each `mimo` command of a page, in its order."""
    shells = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [shlex.split(line)[1:] for shell in shells for line in shell.splitlines() if line.startswith("mimo ")]


def build(folder: Path) -> Path:
    """Build the package of a folder, and return a folder into which it is installed."""
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    (wheel,) = (folder / "dist").glob("*.whl")
    with ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"
