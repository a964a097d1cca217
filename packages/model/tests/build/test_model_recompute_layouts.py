"""Recomputation and split backwards where layers hold collectives: every rank repeats the same ones."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import pytest

from mimo.model import DECODER, HYBRID, DecoderConfig, HybridConfig, LanguageModelSpec
from mimo.model.testing import LanguageLayout, assert_language_layouts
from mimo.topology import Recompute

DENSE = DecoderConfig(
    vocabulary=11, hidden=12, layers=2, heads=6, kv_heads=2, intermediate=10, attention_bias=True, query_key_norm=True
)
EXPERTS = DecoderConfig(
    vocabulary=11, hidden=12, layers=2, heads=4, head_dim=4, intermediate=12, experts=4, shared_intermediate=6,
    dense_layers=1, balance_loss=0.1, z_loss=0.1, expert_bias_rate=0.01,
)  # fmt: skip
MAMBA = HybridConfig(
    vocabulary=11, hidden=12, pattern="ME*-", heads=4, kv_heads=2, head_dim=4, intermediate=10, activation="relu2",
    experts=4, shared_intermediate=6, balance_loss=0.1, mamba_heads=6, mamba_head_dim=3, mamba_groups=3,
    mamba_state=5, mamba_chunk=4,
)  # fmt: skip
LAYERS = frozenset({"layers", "head"})


LANES = ((6, 0, 5),)
LAYOUTS: Mapping[str, tuple[DecoderConfig | HybridConfig, LanguageLayout]] = {
    "tp2": (DENSE, LanguageLayout(tp=2, lanes=LANES)),
    "tp3, copied keys": (DENSE, LanguageLayout(tp=3, lanes=LANES)),
    "tp2, rows split": (DENSE, LanguageLayout(tp=2, sequence_parallel=True, lanes=LANES)),
    "tp2, no rows": (DENSE, LanguageLayout(tp=2, sequence_parallel=True, lanes=((),))),
    "cp2": (DENSE, LanguageLayout(cp=2, lanes=LANES)),
    "cp2, a rank without rows": (DENSE, LanguageLayout(cp=2, lanes=((1,),))),
    "cp2, a rank without rows, layers frozen": (DENSE, LanguageLayout(cp=2, lanes=((1,),), frozen=LAYERS)),
    "cp2 tp2, rows split": (DENSE, LanguageLayout(cp=2, tp=2, sequence_parallel=True, lanes=LANES)),
    "ep2 over lanes, one empty": (EXPERTS, LanguageLayout(ep=2, lanes=((5, 3), ()))),
    "ep2 over lanes, layers frozen": (EXPERTS, LanguageLayout(ep=2, lanes=((5, 3), ()), frozen=LAYERS)),
    "ep2 over tensor ranks": (EXPERTS, LanguageLayout(tp=2, ep=2, lanes=LANES)),
    "ep2 over tensor ranks, rows split": (EXPERTS, LanguageLayout(tp=2, ep=2, sequence_parallel=True, lanes=LANES)),
    "etp2 over context ranks": (EXPERTS, LanguageLayout(cp=2, etp=2, lanes=LANES)),
    "etp2 over context ranks, one empty": (EXPERTS, LanguageLayout(cp=2, etp=2, lanes=((1,),))),
    "hybrid, cp2": (MAMBA, LanguageLayout(cp=2, lanes=LANES)),
    "hybrid, cp2, a rank without rows": (MAMBA, LanguageLayout(cp=2, lanes=((1,),))),
    "hybrid, cp2, a rank without rows, layers frozen": (MAMBA, LanguageLayout(cp=2, lanes=((1,),), frozen=LAYERS)),
    "hybrid, tp2 inside of groups, rows split": (
        MAMBA,
        LanguageLayout(tp=2, ep=2, sequence_parallel=True, lanes=LANES),
    ),
    "ep2 etp2 over cp2 and tp2": (EXPERTS, LanguageLayout(cp=2, tp=2, ep=2, etp=2, lanes=LANES)),
}
WAYS: tuple[Recompute, ...] = ("selective", "full")


@pytest.mark.parametrize("name", LAYOUTS)
def test_collectives_are_repeated_by_all_ranks(name: str) -> None:
    """Nobody waits for a rank without rows, and each rank's gradients are to the bit those without recomputation."""
    config, layout = LAYOUTS[name]
    again = [attrs.evolve(layout, recompute=way) for way in WAYS]
    assert_language_layouts(spec_of(config), again, like=layout, config=config)


@pytest.mark.parametrize(
    "config",
    [pytest.param(DENSE, marks=pytest.mark.soak), EXPERTS, pytest.param(MAMBA, marks=pytest.mark.soak)],
    ids=["dense", "experts", "hybrid"],
)
def test_weight_gradients_may_come_later(config: DecoderConfig | HybridConfig) -> None:
    """With recomputation or without, within law 1."""
    layouts = [
        attrs.evolve(layout, recompute=way, splits_backward=True)
        for own, layout in LAYOUTS.values()
        if own is config
        for way in ("none", *WAYS)
    ]
    assert_language_layouts(spec_of(config), layouts, config=config)


def spec_of(config: DecoderConfig | HybridConfig) -> LanguageModelSpec:
    """Return whose settings they are."""
    return HYBRID if isinstance(config, HybridConfig) else DECODER
