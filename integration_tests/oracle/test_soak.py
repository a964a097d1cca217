"""The whole product of layouts and kinds of data and model; `test_oracle.py` runs a part of it every time."""

from __future__ import annotations

from typing import Any

import pytest
from oracle import Oracle
from tables import table
from test_oracle import CLEAR_SEEDS, EXPERTS, LAYOUTS, SLICED

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "biases, one key-value head": {"attention_bias": True, "mlp_bias": True, "kv_heads": 1},
}

ALL = LAYOUTS | SLICED

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("pictures", ["mixed", "first", "none", "digits"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("layout", ALL)
def test_every_combination(layout: str, microbatches: int, model: str, pictures: str, oracle: Oracle) -> None:
    """Loss, gradients and weights equal one process, whatever is combined."""
    modules = ALL[layout]
    count = microbatches if 24 % (modules["language"].get("dp", 1) * microbatches) == 0 else 2
    settings = table(modules, microbatches=count, pictures=pictures, language=MODELS[model])
    assert oracle.check(settings) == ""


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("scores", CLEAR_SEEDS)
@pytest.mark.parametrize("layout", EXPERTS)
def test_every_combination_of_experts(layout: str, scores: str, microbatches: int, oracle: Oracle) -> None:
    """The same with experts."""
    language, seed = CLEAR_SEEDS[scores]
    count = microbatches if 24 % (EXPERTS[layout]["language"]["dp"] * microbatches) == 0 else 2
    assert oracle.check(table(EXPERTS[layout], microbatches=count, language=language, seed=seed)) == ""
