"""What tests of any package share: one thread for torch, and the fixture of every test that needs several processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from ranks import fork_ranks

# Before anything imports torch: a parent whose pool of threads has run would hang its forked children.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture
def run_ranks() -> Callable[..., list[Any]]:
    """`fork_ranks`, for tests in any package."""
    return fork_ranks
