"""What tests of any package share: the environment of their processes, and fixtures of tests that need several."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mimo.testing.garbage  # noqa: F401  # before torch is imported
from mimo.testing import fork_ranks

# Before anything imports torch: a parent whose pool of threads has run would hang its forked children.
os.environ["OMP_NUM_THREADS"] = "1"
# Each test makes the trials of models that it needs: a record of an earlier one would hide a step that is missing.
os.environ["MIMO_TRIALS"] = "0"
# Sessions install what a package declares, which may be torch without NumPy; torch warns of that in each process.
os.environ.setdefault("PYTHONWARNINGS", "ignore:Failed to initialize NumPy:UserWarning")
# Where ranks outnumber cores, whoever is woken would take the core of the thread that wakes it and that holds a lock of
# gloo's; another thread of gloo's tries that lock in a loop until then, for a third of all CPU time.
if sys.platform == "linux":
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

_DETACH = 2  # unmounts although a process may still have a file open there


def pytest_collection_finish() -> None:
    """Spare looking for garbage among what has been imported and collected, which is there to the end."""
    gc.freeze()


@pytest.fixture
def run_ranks() -> Callable[..., list[Any]]:
    """`fork_ranks`, for tests in any package."""
    return fork_ranks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB, where this process may mount one."""
    folder, system = tmp_path / "disk", ctypes.CDLL(None)
    folder.mkdir()
    if system.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, b"size=4m"):
        pytest.skip("mounting a file system needs root")
    yield folder
    system.umount2(bytes(folder), _DETACH)
