"""The hybrid over any ranks against itself on one rank: rows, losses, loads and every gradient (law 1)."""

from __future__ import annotations

import pytest

from mimo.model import HYBRID, HybridConfig
from mimo.model.testing import LanguageLayout, assert_language_layouts

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
LANES = ((6, 0, 3, 5), (4, 7), (), (1,))
LAYOUTS = {
    "all kinds": [
        LanguageLayout(tp=2, lanes=LANES[:1], sequence_parallel=True),
        LanguageLayout(cp=2, lanes=LANES[:1]),
        LanguageLayout(cp=2, lanes=LANES[3:]),
        LanguageLayout(tp=2, ep=2, pp=2, lanes=LANES[:1], sequence_parallel=True),
        LanguageLayout(cp=2, ep=2, pp=5, lanes=LANES[:1]),
        LanguageLayout(cp=2, tp=2, lanes=LANES[:1]),
        LanguageLayout(lanes=LANES),
        LanguageLayout(cp=2, tp=2, ep=4, etp=2, pp=3, sequence_parallel=True, lanes=LANES[:2]),
    ],
    "one group": [
        LanguageLayout(tp=3, lanes=LANES[:1], sequence_parallel=True),
        LanguageLayout(cp=2, tp=2, lanes=LANES[:1], sequence_parallel=True),
        LanguageLayout(tp=2, lanes=LANES[2:3], sequence_parallel=True),
    ],
    "three groups": [
        LanguageLayout(tp=2, lanes=LANES[:1]),
        LanguageLayout(cp=3, lanes=LANES[:1]),
        LanguageLayout(cp=2, lanes=LANES[:2]),
        LanguageLayout(cp=2, lanes=LANES[2:3]),
    ],
}
EVERY = [
    *(LanguageLayout(tp=tp, lanes=LANES[:1], sequence_parallel=splits) for tp in (2, 3) for splits in (False, True)),
    *(LanguageLayout(cp=2, lanes=lanes) for lanes in (LANES[:1], LANES[2:3], LANES[3:])),
    LanguageLayout(cp=3, lanes=LANES[:1]),
    *(LanguageLayout(cp=2, tp=2, lanes=LANES[:1], sequence_parallel=splits) for splits in (False, True)),
    LanguageLayout(cp=2, lanes=LANES[:2]),
    LanguageLayout(lanes=LANES),
    LanguageLayout(tp=2, lanes=LANES[2:3], sequence_parallel=True),
]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "all kinds" else pytest.mark.soak) for name in CONFIGS]
)
def test_layout_changes_nothing(name: str) -> None:
    """Heads, groups cut inside too, rows of samples and lanes, stages of one kind of layer, experts anywhere."""
    assert_language_layouts(HYBRID, LAYOUTS[name], config=CONFIGS[name])


@pytest.mark.soak
@pytest.mark.parametrize("name", CONFIGS)
def test_no_layout_changes_anything(name: str) -> None:
    """All of these layouts of all of these models."""
    layouts = [layout for layout in EVERY if name != "all kinds" or layout.tp < 3]
    assert_language_layouts(HYBRID, layouts, config=CONFIGS[name])
