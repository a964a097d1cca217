"""What tests of any package share: the environment of their processes, and fixtures of tests that need several."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mimo.testing.garbage  # noqa: F401  # before torch is imported
from mimo.testing import fork_ranks

# Before anything imports torch: a parent whose pool of threads has run would hang its forked children.
os.environ["OMP_NUM_THREADS"] = "1"
# Compilers would start processes of their own beside the tests, which keep all cores busy.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# What trials of models find is kept for as long as these tests run, as it is for users: ranks of a test share it too.
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers have it from whom they work for
    os.environ["MIMO_TRIALS"] = tempfile.mkdtemp(prefix="trials-")
    atexit.register(shutil.rmtree, os.environ["MIMO_TRIALS"], ignore_errors=True)
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
