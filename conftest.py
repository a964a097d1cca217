"""The fixture of every test that needs several processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ranks import fork_ranks


@pytest.fixture
def run_ranks() -> Callable[..., list[Any]]:
    """`fork_ranks`, for tests in any package."""
    return fork_ranks
