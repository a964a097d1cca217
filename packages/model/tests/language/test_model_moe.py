"""A mixture of experts on one rank against formulas written out row by row, in double precision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mimo.hooks import ConfigError, PluginError
from mimo.model import DECODER, DecoderConfig, ExpertSupport, LanguageModelSpec, Stage
from mimo.model.language.expert_plan import follow_loads
from mimo.model.language.moe import Moe
from mimo.model.language.routing import Routing, add_router_losses
from mimo.model.runtime import (
    ExpertAxis,
    GroupedLinear,
    LanguageBatch,
    Part,
    Router,
    Split,
    TensorAxis,
    build_part,
    local,
)
from mimo.topology import Grid

BASE = DecoderConfig(vocabulary=5, hidden=6, layers=1, heads=1, intermediate=5, experts=4)
CONFIGS = {
    "softmax": BASE,
    "softmax, not normalised": attrs.evolve(BASE, router_normalize=False, router_scale=2.5),
    "one expert each": attrs.evolve(BASE, router_normalize=False, experts_per_token=1),
    "all experts": attrs.evolve(BASE, experts_per_token=4),
    "sigmoid": attrs.evolve(BASE, router_score="sigmoid", experts_per_token=3, router_scale=0.7),
    "sigmoid, biased, shared": attrs.evolve(
        BASE, router_score="sigmoid", expert_bias_rate=0.1, shared_intermediate=3, intermediate=7, mlp_bias=True
    ),
    "a width of their own": attrs.evolve(BASE, layers=2, dense_layers=1, expert_intermediate=7),
    "softmax, biased": attrs.evolve(BASE, expert_bias_rate=0.1),
}


def _batch(weights: list[float] | None = None) -> LanguageBatch:
    """Three samples, one empty, one without a label, and two rows of padding."""
    tokens = torch.arange(11) % 5
    labels = torch.tensor([1, 2, -100, 4, 0, -100, -100, -100, -100, -100, -100])
    given = None if weights is None else torch.tensor(weights)
    return LanguageBatch.of(tokens, labels, torch.zeros(11, dtype=torch.long), lengths=(5, 0, 4), weights=given)


def _layer(config: DecoderConfig) -> Moe:
    torch.manual_seed(4)
    layer = Moe(config).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.5)
    return layer


def _swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    inner = gate @ x
    return down @ (inner * inner.sigmoid() * (up @ x))


def _scores(config: DecoderConfig, layer: Moe, x: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """Return logits, scores and chosen experts of one row."""
    logits = layer.router.weight @ x
    exponentials = logits.exp()
    scores = exponentials / exponentials.sum() if config.router_score == "softmax" else 1 / (1 + (-logits).exp())
    ranked = scores if layer.router.bias is None else scores + layer.router.bias
    best = sorted(range(config.experts), key=lambda e: -float(ranked[e]))
    return logits, scores, best[: config.experts_per_token]


def _row(config: DecoderConfig, layer: Moe, x: Tensor) -> Tensor:
    _, scores, chosen = _scores(config, layer, x)
    whole = sum((scores[e] for e in chosen), torch.zeros(())) if config.router_normalize else 1.0
    experts = layer.experts
    assert experts.gate is not None
    y = torch.zeros_like(x)
    for e in chosen:
        made = _swiglu(x, experts.gate.weight[e], experts.up.weight[e], experts.down.weight[e])
        y = y + config.router_scale * scores[e] / whole * made
    if layer.shared is not None:
        gate, up, down = layer.shared.gate, layer.shared.up, layer.shared.down
        assert gate is not None
        assert gate.bias is not None
        assert up.bias is not None
        assert down.bias is not None
        inner = gate.weight @ x + gate.bias
        y = y + down.weight @ (inner * inner.sigmoid() * (up.weight @ x + up.bias)) + down.bias
    return y


def _check_layer(_rank: int, config: DecoderConfig) -> None:
    layer, batch = _layer(config), _batch()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(11, config.hidden, dtype=torch.float64, generator=generator)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    routing = Routing.of(batch, TensorAxis.single())
    found, choices = layer(ours, routing)
    wanted = torch.stack([_row(config, layer, row) for row in theirs])
    used = sum(batch.lengths)
    torch.testing.assert_close(found[:used], wanted[:used], rtol=1e-12, atol=1e-12)
    if layer.shared is None:
        assert not found[used:].any()  # padding is routed nowhere
    direction = torch.randn(found.shape, dtype=torch.float64, generator=generator)
    direction[used:] = 0
    of_found = torch.autograd.grad(found, [ours, *trained], direction)
    of_wanted = torch.autograd.grad(wanted, [theirs, *trained], direction)
    for one, other in zip(of_found, of_wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)
    assert choices.experts.shape == (used, config.experts_per_token)
    chosen = [set(_scores(config, layer, row)[2]) for row in x[:used]]
    assert [set(row) for row in choices.experts.tolist()] == chosen


@pytest.mark.parametrize("name", CONFIGS)
def test_experts_equal_a_loop_over_rows(run_ranks: Callable[..., list[Any]], name: str) -> None:
    """Each row gets the weighted sum of what its best experts make of it, and the shared one's; gradients follow."""
    run_ranks(1, _check_layer, CONFIGS[name])


def _check_losses(_rank: int, config: DecoderConfig) -> None:
    for weights, weight in ((None, 4), ([0.5, 0.0, 0.0, 2.0, 0.25, *[0.0] * 6], 2.75)):
        _check_losses_of(config, _batch(weights), weight)


def _check_losses_of(config: DecoderConfig, batch: LanguageBatch, weight: float) -> None:
    config = attrs.evolve(config, balance_loss=0.3, z_loss=0.01)
    layer = _layer(config)
    x = torch.randn(11, config.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    routing = Routing.of(batch, TensorAxis.single())
    _, choices = layer(x, routing)
    add_router_losses(routing, {"layers.7": choices}, batch=batch, config=config, experts=ExpertAxis.single())
    balance, z = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    loads = [0] * config.experts
    start = 0
    for length, labelled in zip(batch.lengths, (weight, 0, 0), strict=True):
        counts = [0] * config.experts
        shares, squares = [], []
        for row in x[start : start + length]:
            logits, scores, chosen = _scores(config, layer, row)
            shares.append(scores / scores.sum())
            squares.append(logits.exp().sum().log() ** 2)
            for e in chosen:
                counts[e] += 1
                loads[e] += 1
        if length:
            mean = torch.stack(shares).mean(0)
            frequency = [config.experts / (config.experts_per_token * length) * count for count in counts]
            sample = sum((frequency[e] * mean[e] for e in range(config.experts)), torch.zeros(()))
            balance = balance + 0.3 * labelled * sample
            z = z + 0.01 * labelled * torch.stack(squares).mean()
        start += length
    assert batch.aux_losses.losses.keys() == {"balance", "z"}
    assert batch.aux_losses.counts["layers.7.load"].tolist() == loads
    for found, wanted in ((batch.aux_losses.losses["balance"], balance), (batch.aux_losses.losses["z"], z)):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
        assert float(found) > 0
        (of_found,) = torch.autograd.grad(found, layer.router.weight, retain_graph=True)
        (of_wanted,) = torch.autograd.grad(wanted, layer.router.weight, retain_graph=True)
        torch.testing.assert_close(of_found, of_wanted, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("name", CONFIGS)
def test_balance_and_z_losses_are_means_over_samples_times_the_weight_of_their_labels(
    run_ranks: Callable[..., list[Any]], name: str
) -> None:
    """Both are those of the formulas, sample by sample; a sample without rows or labels adds nothing but its load."""
    run_ranks(1, _check_losses, CONFIGS[name])


def _build(config: DecoderConfig, frozen: frozenset[str] = frozenset(), spec: LanguageModelSpec = DECODER) -> Part:
    return build_part(
        spec,
        config,
        grid=Grid(name="language", ranks=(0,)),
        seed=1,
        axis=TensorAxis.single(),
        mesh=DeviceMesh("cpu", [0], mesh_dim_names=("tp",)),
        device=torch.device("cpu"),
        frozen=frozen,
        expert_mesh=DeviceMesh("cpu", [[0]], mesh_dim_names=("ep", "etp")),
    )


def _check_bias(_rank: int) -> None:
    config = attrs.evolve(BASE, layers=2, dense_layers=1, expert_bias_rate=0.25)
    for frozen, moved in ((frozenset[str](), True), (frozenset({"layers"}), False)):
        part = _build(config, frozen)
        bias = part.parameters["language.layers.1.mlp.router.bias"]
        assert not bias.requires_grad
        follow_loads(part.module, {"layers.1.load": torch.tensor([1.0, 3.0, 2.0, 2.0])})
        assert local(bias).tolist() == ([0.25, -0.25, 0.0, 0.0] if moved else [0.0] * 4)
        follow_loads(part.module, {"layers.1.load": torch.tensor([0, 3, 9, 4])})
        assert local(bias).tolist() == ([0.5, 0.0, -0.25, 0.0] if moved else [0.0] * 4)


def test_bias_follows_the_load(run_ranks: Callable[..., list[Any]]) -> None:
    """Experts chosen less than the mean move up by the rate, those chosen more down; a frozen router stays."""
    run_ranks(1, _check_bias)


def _check_names(_rank: int) -> None:
    config = attrs.evolve(
        BASE, layers=2, dense_layers=1, shared_intermediate=3, expert_intermediate=7, expert_bias_rate=0.1
    )
    part = _build(config)
    dense = {"layers.0.mlp.gate.weight", "layers.0.mlp.up.weight", "layers.0.mlp.down.weight"}
    shapes = {
        name.removeprefix("language."): tuple(parameter.shape)
        for name, parameter in part.parameters.items()
        if ".mlp." in name
    }
    assert shapes.keys() - dense == {f"layers.1.mlp.{name}" for name in (
        "experts.gate.weight", "experts.up.weight", "experts.down.weight", "router.weight", "router.bias",
        "shared.gate.weight", "shared.up.weight", "shared.down.weight",
    )}  # fmt: skip
    assert shapes["layers.1.mlp.experts.gate.weight"] == (4, 7, 6)
    assert shapes["layers.1.mlp.experts.down.weight"] == (4, 6, 7)
    assert shapes["layers.1.mlp.shared.up.weight"] == (3, 6)
    assert part.experts == {f"language.layers.1.mlp.experts.{name}.weight" for name in ("gate", "up", "down")}
    weight = local(part.parameters["language.layers.1.mlp.experts.up.weight"].detach())
    assert not torch.equal(weight[0], weight[1])
    assert float(weight.std()) == pytest.approx((3 * 6) ** -0.5, rel=0.2)


def test_names_and_shapes_of_experts(run_ranks: Callable[..., list[Any]]) -> None:
    """All experts of a layer are one parameter, drawn apart; routers and the shared expert have their own."""
    run_ranks(1, _check_names)


def _plan_of(splits: dict[str, Split], _module: nn.Module, _axis: ExpertAxis) -> dict[str, Split]:
    return splits


def _check_bad_plans(_rank: int) -> None:
    config = attrs.evolve(BASE, layers=1)
    for path, split in (("layers.0.mlp.experts.up.weight", Split(1)), ("norm.weight", Split(1, experts=True))):
        plan = partial(_plan_of, {path: split})
        support = ExpertSupport(count=lambda config: config.experts, plan=plan)
        with pytest.raises(PluginError, match=rf"plugin: expected an expert plan of 'decoder' .* got \['{path}'\]"):
            _build(config, spec=attrs.evolve(DECODER, experts=support))


def test_an_expert_plan_that_would_be_reduced_wrongly_is_refused(run_ranks: Callable[..., list[Any]]) -> None:
    """Splits that are not marked as those of experts, and parameters that the tensor plan has too, are named."""
    run_ranks(1, _check_bad_plans)


def _check_grouped(_rank: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for inputs, outputs in ((8, 4), (8, 12), (5, 3)):  # the first two go to torch's kernel
        for counts in ([2, 0, 5], [0, 0, 0], [0, 4, 0]):
            layer = GroupedLinear(3, inputs, outputs)
            x = torch.randn(sum(counts), inputs, generator=generator).requires_grad_()
            found = layer(x, counts)
            parts = zip(x.split(counts), layer.weight, strict=True)
            wanted = torch.cat([part @ weight.T for part, weight in parts])
            direction = torch.randn(found.shape, generator=generator)
            of_found = torch.autograd.grad(found, [x, layer.weight], direction)
            of_wanted = torch.autograd.grad(wanted, [x, layer.weight], direction)
            for one, other in zip((found, *of_found), (wanted, *of_wanted), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_grouped_products_of_any_widths_and_counts(run_ranks: Callable[..., list[Any]]) -> None:
    """Aligned widths or not, experts without rows, no rows at all: the products of each expert's rows."""
    run_ranks(1, _check_grouped)


def _check_biased(_rank: int) -> None:
    torch.manual_seed(0)
    layer, counts = GroupedLinear(3, 8, 4, bias=True), [2, 0, 5]
    assert layer.bias is not None
    assert not layer.bias.any()
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(7, 8)
    parts = zip(x.split(counts), layer.weight, layer.bias, strict=True)
    wanted = torch.cat([part @ weight.T + bias for part, weight, bias in parts])
    found = layer(x, counts)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    # A gradient of any strides: here that of every second column of something wider.
    wide = torch.stack((found, found), 2).flatten(1)[:, ::2].sum()
    (of_bias,) = torch.autograd.grad(wide, [layer.bias])
    assert of_bias.tolist() == [[float(count)] * 4 for count in counts]
    layer.adds_bias = False
    torch.testing.assert_close(layer(x, counts), wanted - layer.bias.repeat_interleave(torch.tensor(counts), 0))
    (of_bias,) = torch.autograd.grad(layer(x, counts).sum(), [layer.bias])
    assert not of_bias.any()


def test_experts_may_have_biases(run_ranks: Callable[..., list[Any]]) -> None:
    """Each row gets that of its expert; of ranks that compute parts of the same outputs one alone adds it."""
    run_ranks(1, _check_biased)


class _Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2), requires_grad=False)
        self.shift = nn.Parameter(torch.zeros(2))


def _check_fixed(_rank: int) -> None:
    spec = attrs.evolve(
        DECODER, build=lambda _config, _stage: _Fixed(), tensor=None, experts=None, context=None, parts={}
    )
    part = build_part(
        spec, BASE, grid=Grid(name="language", ranks=(0,)), seed=1, axis=TensorAxis.single(),
        mesh=DeviceMesh("cpu", [0], mesh_dim_names=("tp",)), device=torch.device("cpu"),
    )  # fmt: skip
    trains = {name: parameter.requires_grad for name, parameter in part.parameters.items()}
    assert trains == {"language.scale": False, "language.shift": True}


def test_a_parameter_that_its_author_does_not_train_stays_so(run_ranks: Callable[..., list[Any]]) -> None:
    """``requires_grad=False`` survives the building."""
    run_ranks(1, _check_fixed)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"experts": 0, "z_loss": 0.1}, r"config\.z_loss: expected 0\.0, since the model has no experts, got 0\.1"),
        ({"experts": 0, "router_score": "sigmoid"}, r"config\.router_score: expected 'softmax', since"),
        ({"experts": 0, "experts_per_token": 1}, r"config\.experts_per_token: expected 2, since"),
        ({"experts": 2, "experts_per_token": 3}, r"config\.experts_per_token: expected at most experts = 2, got 3"),
        ({"experts_per_token": 1}, r"config\.router_normalize: expected false where experts_per_token = 1"),
        ({"dense_layers": 1}, r"config\.dense_layers: expected fewer than layers = 1"),
        ({"mlp_bias": True}, r"config\.mlp_bias: expected false, since experts have no biases"),
        (
            {"expert_intermediate": 7},
            r"config\.intermediate: expected nothing, since there are no dense layers, .* got 5",
        ),
        ({"balance_loss": -1.0}, r"config\.balance_loss: expected a finite number of 0 or more, got -1\.0"),
        ({"router_scale": 0.0}, r"config\.router_scale: expected a finite number above 0"),
        ({"experts": -1}, r"config\.experts: expected 0 or more"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], match: str) -> None:
    """Keys of mixtures in a dense model, too many experts a row, and the like are refused, never ignored."""
    with pytest.raises(ConfigError, match=match):
        attrs.evolve(BASE, **settings)


def test_the_spec_of_a_model_with_experts_names_losses_and_loads() -> None:
    """The spec names the losses and loads that its aux_losses will get, none of a dense model."""
    config = attrs.evolve(BASE, layers=3, dense_layers=1, z_loss=0.1)
    assert DECODER.aux_losses(config).losses == ("z",)
    assert DECODER.aux_losses(config).counts == {"layers.1.load": 4, "layers.2.load": 4}
    dense = DECODER.aux_losses(DecoderConfig())
    assert (dense.losses, dense.counts) == ((), {})
    assert DECODER.experts is not None
    assert DECODER.experts.count(config) == 4
    assert Stage(1, 3).layers(3) == range(1, 2)


def _check_low_precision(_rank: int) -> None:
    router = Router(4, 3, 2, score="softmax", normalize=True, scale=1.0, biased=False).bfloat16()
    choices = router(torch.randn(5, 4, dtype=torch.bfloat16))
    assert choices.logits.dtype == choices.weights.dtype == torch.float32


def test_routers_compute_in_fp32(run_ranks: Callable[..., list[Any]]) -> None:
    """Scores of bfloat16 rows and weights are fp32."""
    run_ranks(1, _check_low_precision)
