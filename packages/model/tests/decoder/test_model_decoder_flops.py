"""What a stage of the decoder takes by formula, beside what PyTorch counts when it runs."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mimo.model import DECODER, DecoderConfig, OpCost, Stage, attention_cost, linear_cost
from mimo.model.runtime import NO_LABEL, LanguageBatch

CONFIG = DecoderConfig(vocabulary=50, hidden=16, layers=3, heads=4, kv_heads=2, intermediate=24)
MIXED = DecoderConfig(
    vocabulary=50,
    hidden=16,
    layers=3,
    heads=4,
    experts=4,
    experts_per_token=2,
    expert_intermediate=12,
    shared_intermediate=8,
    dense_layers=1,
)
LENGTHS = (5, 9)
LABELS = 6


def work(config: DecoderConfig, stage: Stage | None = None, recompute: Any = "none") -> OpCost:
    """Return what all parts of a stage take together."""
    assert DECODER.flops is not None
    return sum(DECODER.flops(config, stage or Stage(), recompute, LENGTHS, LABELS).values(), OpCost())


def counted(config: DecoderConfig) -> tuple[float, int]:
    """Return the operations in products with weights that a forward is seen to do, and the number of weights."""
    rows = sum(LENGTHS)
    labels = torch.full((rows,), NO_LABEL)
    labels[:LABELS] = 1
    batch = LanguageBatch(
        tokens=torch.zeros(rows, dtype=torch.long),
        labels=labels,
        positions=torch.cat([torch.arange(length) for length in LENGTHS]),
        lengths=LENGTHS,
        placeholders={},
        samples=torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)),
        label_tokens=(3, 3),
    )
    module: Any = DECODER.build(config, Stage())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module.losses(module(batch, {}, None), labels)
    by_operation = counter.get_flop_counts()["Global"]
    products = (count for operation, count in by_operation.items() if "attention" not in str(operation))
    return float(sum(products)), sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("config", "grouped"),
    [
        (CONFIG, 0),
        (MIXED, 2 * 3 * 2 * (2 * sum(LENGTHS)) * 16 * 12),  # layers, products, operations, chosen rows
        (attrs.evolve(CONFIG, tied=True, attention_bias=True), 0),
        (attrs.evolve(CONFIG, qkv_bias=True, head_dim=6, query_key_norm=True), 0),
    ],
)
def test_counts_the_products_and_weights_that_a_forward_has(config: DecoderConfig, grouped: int) -> None:
    """Multiplications are those that PyTorch counts, which knows no grouped ones; weights are all but norms' scales."""
    operations, weights = counted(config)
    found = work(config)
    assert found.weighted == operations + grouped
    norms = (2 * config.layers + 1) * config.hidden + 2 * config.layers * config.head_width * config.query_key_norm
    assert weights - found.weights in (norms, norms - config.hidden)


def test_stages_share_out_the_whole() -> None:
    """What the stages of a pipeline take adds up to what the model takes; the one with the head takes more."""
    stages = [work(CONFIG, Stage(index, 3)) for index in range(3)]
    whole = work(CONFIG)
    assert sum(stage.forward for stage in stages) == pytest.approx(whole.forward)
    assert stages[2].forward > stages[1].forward == stages[0].forward


def test_attention_is_twice_as_much_backward_and_all_of_it_awaited() -> None:
    """The product of two activations has two gradients, neither of them a weight's."""
    inner = attention_cost((4,), width=8, causal=False)
    assert inner.forward == 2 * (2 * 4 * 4 * 8)
    assert inner.input_gradient == 2 * inner.forward
    assert inner.weight_gradient == 0
    assert attention_cost((4,), width=8, causal=True).forward == inner.forward / 2


def test_a_window_bounds_what_attention_takes() -> None:
    """Rows that look back at no more than a window cost as much wherever they lie; short samples cost what they did."""
    whole, near = (attention_cost((4, 100), width=8, causal=True, window=window).forward for window in (0, 10))
    assert near == attention_cost((4, 10), width=8, causal=True).forward + 90 * 10 * 4 * 8
    assert attention_cost((4, 100), width=8, causal=True, window=100).forward == whole


def test_recomputation_keeps_less_and_repeats() -> None:
    """Full recomputation keeps a layer's input and repeats all of it; selective repeats no product with a weight."""
    none, selective, full = (work(CONFIG, Stage(1, 3), how) for how in ("none", "selective", "full"))
    assert none.repeated == 0
    assert selective.repeated == none.inner
    assert full.repeated == none.forward
    assert full.split + full.copied == sum(LENGTHS) * CONFIG.hidden
    assert full.split + full.copied < selective.split + selective.copied < none.split + none.copied
    assert selective.recomputed > 0 < full.recomputed


def test_what_is_recomputed_is_not_added_up() -> None:
    """Of two things in a row that are recomputed, only one is there again at a time."""
    total = OpCost(recomputed=3) + OpCost(recomputed=5) + linear_cost(1, 1, 1)
    assert total.recomputed == 5
