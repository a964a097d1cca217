"""What several processes compare with, made by the first that asks for it."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path


def made_once(path: Path, make: Callable[[Path], object]) -> Path:
    """Return a path where a file is: what ``make`` has written, in this process or in another one, complete."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if not path.exists():
                part = path.with_suffix(".part")
                make(part)
                part.rename(path)
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing keeps it where a process was forked meanwhile
    return path
