"""The whole product of layouts and kinds of data and model; `test_oracle.py` runs a part of it every time."""

from __future__ import annotations

from typing import Any

import pytest
from oracle import Oracle, table
from pool import Pool
from test_oracle import LAYOUTS

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "biases, one key-value head": {"attention_bias": True, "mlp_bias": True, "kv_heads": 1},
}

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def oracle(pool: Pool) -> Oracle:
    """The oracle of all cases here."""
    return Oracle(pool)


@pytest.mark.parametrize("pictures", ["mixed", "first", "none", "digits"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_combination(layout: str, microbatches: int, model: str, pictures: str, oracle: Oracle) -> None:
    """Loss, gradients and weights equal one process, whatever is combined."""
    lanes = LAYOUTS[layout]["language"].get("dp", 1)
    count = microbatches if 24 % (lanes * microbatches) == 0 else 2
    settings = table(LAYOUTS[layout], microbatches=count, pictures=pictures, language=MODELS[model])
    assert "\n".join(oracle.check(settings)) == ""
