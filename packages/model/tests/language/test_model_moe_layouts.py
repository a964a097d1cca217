"""A mixture of experts over any ranks against itself on one rank: outputs, losses, loads and every gradient (law 1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
from spread import LANES, Layout, check_layout

from mimo.model import DecoderConfig

CONFIGS = {
    "softmax": DecoderConfig(
        vocabulary=11, hidden=16, layers=2, heads=4, kv_heads=2, intermediate=12, experts=4,
        balance_loss=0.3, z_loss=0.1,
    ),
    "sigmoid": DecoderConfig(
        vocabulary=11, hidden=12, layers=3, heads=4, head_dim=4, intermediate=10, experts=8, experts_per_token=3,
        expert_intermediate=7, shared_intermediate=6, dense_layers=1, mlp_bias=True, router_score="sigmoid",
        router_scale=1.7, expert_bias_rate=0.01, balance_loss=0.3, z_loss=0.1,
    ),
    "one each": DecoderConfig(
        vocabulary=7, hidden=8, layers=1, heads=4, intermediate=1, experts=4, experts_per_token=1,
        router_normalize=False,
    ),
}  # fmt: skip
LAYOUTS = {
    "ep 2 over tp 2": Layout(tp=2, ep=2),
    "ep 2 over tp 2, rows split": Layout(tp=2, ep=2, sequence_parallel=True),
    "tp 2, all experts on each": Layout(tp=2),
    "ep 2 over lanes": Layout(dp=2, ep=2, lanes=LANES[:2]),
    "ep 2 over lanes, one empty": Layout(dp=2, ep=2, lanes=LANES[1:3]),
    "ep 2 over context ranks": Layout(cp=2, ep=2),
    "ep 4 over lanes": Layout(dp=4, ep=4, lanes=LANES),
    "ep 2 etp 2 over lanes": Layout(dp=4, ep=2, etp=2, lanes=LANES),
    "ep 2 etp 2 over tp 4, rows split": Layout(tp=4, ep=2, etp=2, sequence_parallel=True),
    "etp 2 over tp 2, two lanes": Layout(dp=2, tp=2, etp=2, lanes=LANES[:2]),
    "ep 2 over tp 2, two lanes": Layout(dp=2, tp=2, ep=2, lanes=LANES[:2]),
    "ep 4 over two lanes of tp 2, rows split": Layout(dp=2, tp=2, ep=4, sequence_parallel=True, lanes=LANES[:2]),
    "ep 4 over cp 2 and tp 2": Layout(cp=2, tp=2, ep=4),
    "ep 4 over cp 2 and tp 2, rows split": Layout(cp=2, tp=2, ep=4, sequence_parallel=True),
    "ep 4 over lanes and cp 2, nothing in one": Layout(dp=2, cp=2, ep=4, lanes=LANES[2:]),
    "etp 4 over tp 4": Layout(tp=4, etp=4),
    "ep 2 over tp 2, next to nothing": Layout(tp=2, ep=2, lanes=LANES[3:]),
    "ep 2 over tp 2, nothing": Layout(tp=2, ep=2, lanes=LANES[2:3]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_experts_lie_anywhere_and_change_nothing(run_ranks: Callable[..., list[Any]], name: str, layout: str) -> None:
    """Wherever rows and experts lie, weights are the same bits, and losses, loads and gradients those of one rank."""
    chosen = LAYOUTS[layout]
    run_ranks(chosen.dp * chosen.cp * chosen.tp, check_layout, CONFIGS[name], chosen)


@pytest.mark.parametrize("layout", ["ep 2 over tp 2, rows split", "ep 2 over lanes"])
def test_experts_on_several_stages(run_ranks: Callable[..., list[Any]], layout: str) -> None:
    """Stages hold the experts of their layers, none where all of theirs are dense."""
    run_ranks(2, check_layout, CONFIGS["sigmoid"], attrs.evolve(LAYOUTS[layout], pp=3))
