"""What the tests compute in their own process leaves it fit for forking."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo  # the first DTensor imports it, which would take each forked worker a second or more


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Compute on one thread: a parent whose thread pool has run would hang its forked children."""
    torch.set_num_threads(1)
