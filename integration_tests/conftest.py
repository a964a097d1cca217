"""What integration tests share: the oracle, which computes each model's truth once."""

from __future__ import annotations

import pytest
from oracle import Oracle


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    """The oracle of the whole session."""
    return Oracle()
