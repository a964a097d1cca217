"""A mixture of experts over any ranks against itself on one rank: rows, losses, loads and every gradient (law 1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mimo.model import DECODER, DecoderConfig, Stage
from mimo.model.runtime import LanguageBatch
from mimo.model.testing import LanguageLayout, assert_language_layouts

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
LANES = ((6, 0, 3, 5), (4, 7), (), (1,))
LAYOUTS = [
    LanguageLayout(tp=2, ep=2, lanes=LANES[:1]),
    LanguageLayout(tp=2, ep=2, sequence_parallel=True, lanes=LANES[:1]),
    LanguageLayout(tp=2, lanes=LANES[:1]),
    LanguageLayout(ep=2, lanes=LANES[:2]),
    LanguageLayout(ep=2, lanes=LANES[1:3]),
    LanguageLayout(cp=2, ep=2, lanes=LANES[:1]),
    LanguageLayout(ep=4, lanes=LANES),
    LanguageLayout(ep=2, etp=2, lanes=LANES),
    LanguageLayout(tp=4, ep=2, etp=2, sequence_parallel=True, lanes=LANES[:1]),
    LanguageLayout(tp=2, etp=2, lanes=LANES[:2]),
    LanguageLayout(tp=2, ep=2, lanes=LANES[:2]),
    LanguageLayout(tp=2, ep=4, sequence_parallel=True, lanes=LANES[:2]),
    LanguageLayout(cp=2, tp=2, ep=4, lanes=LANES[:1]),
    LanguageLayout(cp=2, tp=2, ep=4, sequence_parallel=True, lanes=LANES[:1]),
    LanguageLayout(cp=2, ep=4, lanes=LANES[2:]),
    LanguageLayout(tp=4, etp=4, lanes=LANES[:1]),
    LanguageLayout(tp=2, ep=2, lanes=LANES[3:]),
    LanguageLayout(tp=2, ep=2, lanes=LANES[2:3]),
]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if number == 0 else pytest.mark.soak) for number, name in enumerate(CONFIGS)]
)
def test_experts_lie_anywhere_and_change_nothing(name: str) -> None:
    """Wherever rows and experts lie, weights are the same bits, and losses, loads and gradients those of one rank."""
    assert_language_layouts(DECODER, LAYOUTS, config=CONFIGS[name])


def test_experts_on_several_stages() -> None:
    """Stages hold the experts of their layers, none where all of theirs are dense."""
    layouts = [
        LanguageLayout(tp=2, ep=2, pp=3, sequence_parallel=True, lanes=LANES[:1]),
        LanguageLayout(ep=2, pp=3, lanes=LANES[:2]),
    ]
    assert_language_layouts(DECODER, layouts, config=CONFIGS["sigmoid"])


def test_every_row_counts_the_experts_that_it_chose(run_ranks: Callable[..., list[Any]]) -> None:
    """Loads add up to the rows times the experts of each."""
    run_ranks(1, _check_loads)


def _check_loads(_rank: int) -> None:
    config = CONFIGS["sigmoid"]
    tokens = torch.arange(14) % config.vocabulary
    batch = LanguageBatch.of(tokens, tokens, torch.arange(14) % 7, lengths=(7, 7))
    module = DECODER.build(config, Stage())
    module(batch, {}, None)
    loads = batch.aux_losses.counts
    assert set(loads) == {f"layers.{index}.load" for index in config.expert_layers}
    assert {int(load.sum()) for load in loads.values()} == {14 * config.experts_per_token}
