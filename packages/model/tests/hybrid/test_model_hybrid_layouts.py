"""The hybrid over any ranks against itself on one rank: outputs, losses, loads and every gradient (law 1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from spread import LANES, Layout, check_layout

from mimo.model import HybridConfig

CONFIGS = {
    "all kinds": HybridConfig(
        vocabulary=11, hidden=12, pattern="MEM*-", heads=4, kv_heads=2, head_dim=4, intermediate=10,
        activation="relu2", experts=4, expert_intermediate=7, shared_intermediate=6, router_score="sigmoid",
        router_scale=1.7, router_bias=True, balance_loss=0.3, mamba_heads=12, mamba_head_dim=3, mamba_groups=4,
        mamba_state=5, mamba_chunk=4, mamba_step_low=0.01,
    ),
    "one group": HybridConfig(
        vocabulary=13, hidden=8, pattern="MM", tied=True, mamba_heads=6, mamba_head_dim=3, mamba_state=5,
        mamba_chunk=128, mamba_bias=True,
    ),
    "three groups": HybridConfig(
        vocabulary=13, hidden=8, pattern="M", mamba_heads=12, mamba_head_dim=2, mamba_groups=3, mamba_state=5,
        mamba_chunk=3, mamba_conv_bias=False,
    ),
}  # fmt: skip
LAYOUTS = {
    "tp 2": Layout(tp=2),
    "tp 2, rows split": Layout(tp=2, sequence_parallel=True),
    "tp 3": Layout(tp=3),
    "tp 3, rows split": Layout(tp=3, sequence_parallel=True),
    "cp 2": Layout(cp=2),
    "cp 2, nothing": Layout(cp=2, lanes=LANES[2:3]),
    "cp 2, next to nothing": Layout(cp=2, lanes=LANES[3:]),
    "cp 3": Layout(cp=3),
    "cp 2 tp 2": Layout(cp=2, tp=2),
    "cp 2 tp 2, rows split": Layout(cp=2, tp=2, sequence_parallel=True),
    "two lanes, cp 2": Layout(dp=2, cp=2, lanes=LANES[:2]),
    "four lanes": Layout(dp=4, lanes=LANES),
    "tp 2, nothing, rows split": Layout(tp=2, sequence_parallel=True, lanes=LANES[2:3]),
}
CASES = [
    ("all kinds", "tp 2, rows split"),
    ("all kinds", "cp 2"),
    ("all kinds", "cp 2 tp 2"),
    ("all kinds", "cp 2, next to nothing"),
    ("all kinds", "four lanes"),
    ("one group", "tp 3, rows split"),
    ("one group", "cp 2 tp 2, rows split"),
    ("one group", "tp 2, nothing, rows split"),
    ("three groups", "tp 2"),
    ("three groups", "cp 3"),
    ("three groups", "two lanes, cp 2"),
    ("three groups", "cp 2, nothing"),
]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=() if (name, layout) in CASES else pytest.mark.soak)
        for name in CONFIGS
        for layout in LAYOUTS
        if name != "all kinds" or "tp 3" not in layout
    ],
)
def test_layout_changes_nothing(run_ranks: Callable[..., list[Any]], name: str, layout: str) -> None:
    """Heads, groups cut inside too, rows of samples and lanes: weights are the same bits, all else is within law 1."""
    chosen = LAYOUTS[layout]
    run_ranks(chosen.dp * chosen.cp * chosen.tp, check_layout, CONFIGS[name], chosen)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, ep=2, pp=2, sequence_parallel=True),
        Layout(cp=2, ep=2, pp=5),
        Layout(dp=2, cp=2, tp=2, ep=4, etp=2, pp=3, sequence_parallel=True, lanes=LANES[:2]),
    ],
    ids=["tp 2, ep 2 over it", "cp 2, ep 2 over it", "all at once"],
)
def test_experts_lie_anywhere_and_stages_hold_any_layers(run_ranks: Callable[..., list[Any]], layout: Layout) -> None:
    """A stage of Mamba-2 layers alone, of experts alone, of none of either."""
    run_ranks(layout.dp * layout.cp * layout.tp, check_layout, CONFIGS["all kinds"], layout)
