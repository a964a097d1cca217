"""An encoder feeding the language model ``hybrid``, in all kinds of layouts, beside the truth."""

from __future__ import annotations

from typing import Any

import pytest
from cases import Modules, in_turn
from oracle import Oracle
from tables import EVEN_EPS, Table, scheduled, table
from test_oracle import SP, on

CONFIG: dict[str, Any] = {
    "hidden": 24,
    "pattern": "ME*-",
    "heads": 6,
    "kv_heads": 2,
    "intermediate": 37,
    "activation": "relu2",
    "experts": 4,
    "expert_intermediate": 21,
    "shared_intermediate": 11,
    "router_score": "sigmoid",
    "router_scale": 2.5,
    "expert_bias_rate": 0.01,
    "balance_loss": 0.05,
    "mamba_heads": 6,
    "mamba_head_dim": 5,
    "mamba_groups": 2,
    "mamba_state": 7,
    "mamba_chunk": 16,
}
SEED = 13
"""With which, and `EVEN_EPS`, every row's choice of experts is clear, see `oracle.GAP`."""
LAYOUTS: dict[str, Modules] = {
    "lanes 3 to 2": {"vision": on(0, 2), "language": on(3, 4)},
    "language tp2 ep2, colocated": {"vision": on(0, 1), "language": on(0, 1, tp=2, ep=2)},
    "language tp3 sp": {"vision": on(0, 0), "language": on(1, 3, tp=3, **SP)},
    "language cp2": {"vision": on(0, 0), "language": on(1, 2, cp=2)},
    "language pp3": {"vision": on(0, 1, tp=2), "language": on(1, 3, pp=3)},
    "vision tp2 dp2, language tp2 ep4 dp2": {"vision": on(0, 3, tp=2), "language": on(4, 7, tp=2, ep=4, **SP)},
    "language cp2 tp2 pp2 sp": {"vision": on(0, 3), "language": on(0, 7, cp=2, tp=2, pp=2, ep=2, **SP)},
}
PATTERNS = ("ME*M-", "MEM*M-")


def settings_of(layout: str, *, pattern: str = "ME*-", seed: int = SEED, **more: Any) -> Table:
    """Return the settings of a layout with a hybrid."""
    modules = LAYOUTS[layout]
    language = {"plugin": "hybrid", "config": {**CONFIG, "pattern": pattern}, **modules["language"]}
    return table({**modules, "language": language}, seed=seed, eps=EVEN_EPS, **more)


@pytest.mark.parametrize(("layout", "microbatches"), in_turn(LAYOUTS, [4, 1]))
def test_layout_never_changes_the_result(layout: str, microbatches: int, oracle: Oracle) -> None:
    """Loss, gradients and weights equal one process, with 0, 1 or 3 pictures a sample and uneven labels."""
    assert oracle.check(settings_of(layout, microbatches=microbatches)) == ""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("pattern", "seed"),
    [
        pytest.param(pattern, seed, marks=() if (pattern, seed) == ("ME*M-", 9) else pytest.mark.soak)
        for pattern in PATTERNS
        for seed in range(10)
    ],
)
def test_weights_of_any_seed_will_do(pattern: str, seed: int, oracle: Oracle) -> None:
    """Weights agree though Mamba layers enlarge what differs in the rounding of the encoder's tensor ranks."""
    settings = settings_of("language pp3", pattern=pattern, seed=seed, microbatches=4)
    assert oracle.check(oracle.clear(settings)) == ""


@pytest.mark.soak
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_and_with_weight_gradients_put_off(recompute: str, oracle: Oracle) -> None:
    """Layers compute again what they did not keep, and leave weights' gradients for later."""
    settings = settings_of("language cp2 tp2 pp2 sp", microbatches=4)
    keys = settings["modules"]["language"]
    keys["recompute"] = recompute
    layers = keys["config"]
    settings = scheduled(settings, "zb-h1")
    settings["modules"]["language"]["config"] = layers
    assert oracle.check(settings) == ""


@pytest.mark.parametrize("layout", ["language cp2", "lanes 3 to 2"])
def test_slices_without_rows_are_ordinary(layout: str, oracle: Oracle) -> None:
    """Nothing hangs or changes where hardly a sample has a picture."""
    assert oracle.check(oracle.clear(settings_of(layout, microbatches=4, pictures="first"))) == ""
