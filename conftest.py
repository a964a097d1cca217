"""What tests of any package share: one thread for torch, and the fixtures of tests that need several processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pool import Pool
from ranks import fork_ranks

# Before anything imports torch: a parent whose pool of threads has run would hang its forked children.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture
def run_ranks() -> Callable[..., list[Any]]:
    """`fork_ranks`, for tests in any package."""
    return fork_ranks


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Workers that are started once and serve all tests whose functions can be pickled."""
    with Pool() as found:
        yield found
