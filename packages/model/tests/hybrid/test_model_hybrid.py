"""The language model ``hybrid`` on one rank: its settings, initial values, and work by formula."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import attrs
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mimo.hooks import ConfigError
from mimo.model import HYBRID, LANGUAGE_MODELS, HybridConfig, OpCost, Stage, attention_cost, check_module
from mimo.model.runtime import LanguageBatch
from mimo.topology import Grid

SMALL = HybridConfig(
    vocabulary=11, hidden=12, pattern="M*-M", heads=4, head_dim=6, intermediate=10, mamba_heads=4, mamba_head_dim=3
)
RECIPE = HybridConfig(
    vocabulary=131_072, hidden=2688, pattern="MEMEM*EMEMEM*EMEMEM*", heads=32, kv_heads=8, head_dim=128,
    activation="relu2", experts=128, experts_per_token=6, expert_intermediate=1856, shared_intermediate=3712,
    router_score="sigmoid", router_scale=2.5, router_bias=True, balance_loss=1e-4, mamba_heads=64, mamba_head_dim=64,
    mamba_groups=8, mamba_state=128,
)  # fmt: skip
"""Of Megatron's MIMO example."""
MIXED = HybridConfig(
    vocabulary=50, hidden=16, pattern="MEM*-", heads=4, kv_heads=2, head_dim=8, intermediate=24, activation="relu2",
    experts=4, expert_intermediate=12, shared_intermediate=8, mamba_heads=6, mamba_head_dim=4, mamba_groups=2,
    mamba_state=5, mamba_chunk=7,
)  # fmt: skip
LENGTHS = (5, 9)
LABELS = 14


def test_the_recipe_has_the_parameters_that_it_should() -> None:
    """By the sizes of its layers, without making any: 11.5 billion."""
    with torch.device("meta"):
        module = HYBRID.build(RECIPE, Stage())
    hidden, width, shared = 2688, 64 * 64, 8 * 128
    mamba = hidden * (2 * width + 2 * shared + 64) + width * hidden + (width + 2 * shared) * 5 + 3 * 64 + width
    experts = 128 * 2 * hidden * 1856 + 2 * hidden * 3712 + 128 * hidden + 128
    attention = hidden * 128 * (2 * 32 + 2 * 8)
    counts = {letter: RECIPE.pattern.count(letter) for letter in "ME*"}
    assert counts == {"M": 9, "E": 8, "*": 3}
    layers = 9 * mamba + 8 * experts + 3 * attention + 20 * hidden
    assert sum(one.numel() for one in module.parameters()) == layers + 2 * 131_072 * hidden + hidden


def test_it_is_found_by_its_name() -> None:
    """It registers as a third-party package does."""
    from mimo.model.hybrid import plugin

    assert plugin.mimo_register_language_models() == [HYBRID]
    assert (HYBRID.name, LANGUAGE_MODELS.spec) == ("hybrid", type(HYBRID))


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"pattern": "MX"}, "pattern: expected a letter for each layer: M (Mamba-2), E (mixture of experts), * (atten"),
        ({"pattern": ""}, "pattern: expected a letter for each layer"),
        ({"pattern": "M-"}, "heads: expected 8, since the pattern has no *, got 4. Leave it out."),
        ({"experts": 4}, "experts: expected 0, since the pattern has no E, got 4"),
        ({"pattern": "M*-E"}, "experts: expected how many each E of the pattern has, got 0. Set it, or write - for a"),
        ({"mamba_groups": 3}, "mamba_groups: expected a divisor of mamba_heads = 4, got 3"),
        ({"mamba_state": 0}, "mamba_state: expected 1 or more, got 0"),
        ({"mamba_step_low": -1.0}, "mamba_step_low: expected 0 or more, and less than mamba_step_high = inf, got -1.0"),
        ({"mamba_step_low": 1.0, "mamba_step_high": 0.5}, "mamba_step_low: expected 0 or more, and less than mamba_st"),
        ({"kv_heads": 3}, "kv_heads: expected a divisor of heads = 4, got 3"),
        ({"hidden": 0}, "hidden: expected 1 or more, got 0"),
        (
            {"pattern": "M*-E", "experts": 2, "experts_per_token": 3},
            "experts_per_token: expected at most experts = 2, got 3",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changed: Mapping[str, Any], expected: str) -> None:
    """Each with its path; those that a decoder has too as there."""
    with pytest.raises(ConfigError, match=re.escape(f"modules.language.config.{expected}")):
        attrs.evolve(SMALL, **changed)


def test_settings_are_refused_without_assertions_too() -> None:
    """Python's -O drops those; what a decoder has too is checked anyway."""
    code = "from mimo.model import HybridConfig; HybridConfig(pattern='*', heads=4, kv_heads=3)"
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=False)  # noqa: S603 - our own interpreter and text
    assert done.returncode
    assert "modules.language.config.kv_heads: expected a divisor of heads = 4, got 3" in done.stderr


def test_a_vocabulary_must_be_set() -> None:
    """By the settings or by a tokenizer."""
    with pytest.raises(ConfigError, match=r"config\.vocabulary: expected a number of ids, or a tokenizer"):
        HYBRID.build(attrs.evolve(SMALL, vocabulary=0), Stage())


@pytest.mark.parametrize(
    ("tp", "expected"),
    [(3, "expected a divisor of heads = 4, got 3"), (8, "expected a divisor of heads = 4, got 8"), (4, None)],
)
def test_tensor_ranks_divide_heads_of_both_kinds(tp: int, expected: str | None) -> None:
    """Those of attention and those of Mamba-2; groups they need not divide."""
    grid = Grid(name="language", ranks=range(tp), tp=tp)
    if expected is None:
        check_module(HYBRID, SMALL, grid=grid)
        return
    with pytest.raises(ConfigError, match=re.escape(f"modules.language.tp: {expected}")):
        check_module(HYBRID, SMALL, grid=grid)
    alone = HybridConfig(pattern="M", mamba_heads=5)
    with pytest.raises(ConfigError, match="a divisor of mamba_heads = 5"):
        check_module(HYBRID, alone, grid=grid)


def test_initial_values_are_the_references() -> None:
    """Rates 1, 2, …; steps between a thousandth and a tenth; convolutions as PyTorch draws them."""
    torch.manual_seed(1)
    module: Any = HYBRID.build(attrs.evolve(SMALL, pattern="M*-", mamba_heads=64, mamba_head_dim=8), Stage())
    mixer = module.layers["0"].mixer
    torch.testing.assert_close(mixer.rate_log.exp(), torch.arange(1.0, 65.0))
    steps = torch.nn.functional.softplus(mixer.step_bias).detach()
    assert 1e-3 <= float(steps.min()) < 2e-3
    assert 0.05 < float(steps.max()) <= 0.1
    assert torch.equal(mixer.skip, torch.ones(64))
    for part in (mixer.input_conv, mixer.write_conv, mixer.read_conv):
        assert 0.45 < float(part.weight.detach().abs().max()) <= 0.5
        assert not part.bias.any()


def test_rows_depend_on_what_came_before_in_their_sample_alone() -> None:
    """In every kind of layer; a changed token changes its row and later ones of its sample."""
    module: Any = HYBRID.build(attrs.evolve(MIXED, vocabulary=50), Stage())
    tokens = torch.arange(14)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    batches = [
        LanguageBatch.of(ids, torch.full_like(ids, -100), positions, lengths=LENGTHS)
        for ids in (tokens, tokens.index_fill(0, torch.tensor([7]), 49))
    ]
    one, other = (module(batch, {}, None) for batch in batches)
    changed = (one - other).abs().amax(1) > 1e-7
    assert changed.tolist() == [row >= 7 for row in range(14)]


def work(config: HybridConfig, stage: Stage | None = None, recompute: Any = "none") -> OpCost:
    """Return what all parts of a stage take together."""
    assert HYBRID.flops is not None
    return sum(HYBRID.flops(config, stage or Stage(), recompute, LENGTHS, LABELS).values(), OpCost())


def test_counts_the_products_and_weights_that_a_forward_has() -> None:
    """Multiplications are those that PyTorch counts, which knows no grouped ones; weights are all but norms' scales."""
    rows = sum(LENGTHS)
    tokens = torch.zeros(rows, dtype=torch.long)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    batch = LanguageBatch.of(tokens, tokens, positions, lengths=LENGTHS)
    module: Any = HYBRID.build(MIXED, Stage())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module.losses(module(batch, {}, None), tokens)
    by_operation = counter.get_flop_counts()["Global"]
    products = float(sum(n for operation, n in by_operation.items() if "attention" not in str(operation)))
    found = work(MIXED)
    attended = attention_cost(LENGTHS, width=32, causal=True).inner
    grouped = 2 * 2 * (2 * rows) * 16 * 12  # products, operations, chosen rows
    assert found.weighted + found.inner - attended == products + grouped
    weights = sum(parameter.numel() for parameter in module.parameters())
    assert 0 <= weights - found.weights <= (MIXED.layers + 1) * MIXED.hidden


def test_stages_share_out_the_whole() -> None:
    """What the stages of a pipeline take adds up to what the model takes."""
    stages = [work(MIXED, Stage(index, 3)) for index in range(3)]
    assert sum(stage.forward for stage in stages) == pytest.approx(work(MIXED).forward)
    assert sum(stage.weights for stage in stages) == work(MIXED).weights


def test_recomputation_keeps_less_and_repeats() -> None:
    """Full recomputation keeps a layer's input and repeats all of it; selective repeats no product with a weight."""
    middle = attrs.evolve(MIXED, pattern="MMM", **_defaults())
    none, selective, full = (work(middle, Stage(1, 3), how) for how in ("none", "selective", "full"))
    assert (none.repeated, selective.repeated, full.repeated) == (0, none.inner, none.forward)
    assert full.split + full.copied == sum(LENGTHS) * MIXED.hidden
    assert full.split + full.copied < selective.split + selective.copied < none.split + none.copied
    assert selective.recomputed > 0 < full.recomputed


def test_what_is_kept_is_what_a_forward_keeps() -> None:
    """The formula of a Mamba-2 layer beside the bytes that autograd holds, to a fifth."""
    config = HybridConfig(
        vocabulary=8, hidden=48, pattern="M", mamba_heads=8, mamba_head_dim=12, mamba_groups=2, mamba_state=16,
        mamba_chunk=32,
    )  # fmt: skip
    rows = 256
    tokens = torch.zeros(rows, dtype=torch.long)
    batch = LanguageBatch.of(tokens, tokens, torch.arange(rows), lengths=(rows,))
    module: Any = HYBRID.build(config, Stage())
    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and not isinstance(tensor, torch.nn.Parameter):
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return tensor

    parameters = {one.untyped_storage().data_ptr() for one in module.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = module(batch, {}, None)
    assert hidden.requires_grad
    kept = sum(numbers for place, numbers in held.items() if place not in parameters)
    assert HYBRID.flops is not None
    layers = HYBRID.flops(config, Stage(), "none", (rows,), rows)["layers"]
    assert layers.split + layers.copied == pytest.approx(kept, rel=0.2)


def _defaults() -> dict[str, Any]:
    """Return what a pattern of Mamba-2 layers alone leaves out."""
    names = (
        "heads", "kv_heads", "head_dim", "intermediate", "activation", "experts", "expert_intermediate",
        "shared_intermediate",
    )  # fmt: skip
    return {field.name: field.default for field in attrs.fields(HybridConfig) if field.name in names}
