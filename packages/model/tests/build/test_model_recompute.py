"""Recomputation on one rank: the same results, less kept, and nothing computed more often than it must be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from mimo.hooks import ConfigError, PluginError
from mimo.model import DECODER, DecoderConfig, EncoderSpec, check_module
from mimo.model.runtime import (
    NO_LABEL,
    Dispatch,
    ExpertAxis,
    LanguageBatch,
    Part,
    TensorAxis,
    build_part,
    gradient_of,
    local,
)
from mimo.topology import Grid, Recompute

WAYS: tuple[Recompute, ...] = ("none", "selective", "full")
DENSE = DecoderConfig(vocabulary=11, hidden=16, layers=4, heads=4, kv_heads=2, intermediate=40)
EXPERTS = DecoderConfig(
    vocabulary=11, hidden=16, layers=3, heads=4, intermediate=24, experts=4, shared_intermediate=12, dense_layers=1,
    expert_bias_rate=0.01, balance_loss=0.1, z_loss=0.1,
)  # fmt: skip
CONFIGS = {
    "dense": DENSE,
    "tied, biases": attrs.evolve(DENSE, tied=True, attention_bias=True, mlp_bias=True, query_key_norm=True),
    "experts": EXPERTS,
    "sigmoid": attrs.evolve(EXPERTS, router_score="sigmoid", experts_per_token=3),
}
ROWS = 24


def _build(config: DecoderConfig, recompute: Recompute, *, splits_backward: bool = False, frozen: bool = False) -> Part:
    return build_part(
        DECODER,
        config,
        grid=Grid(name="language", ranks=(0,)),
        seed=1,
        axis=TensorAxis.single(),
        mesh=DeviceMesh("cpu", [0], mesh_dim_names=("tp",)),
        expert_mesh=DeviceMesh("cpu", [[0]], mesh_dim_names=("ep", "etp")),
        device=torch.device("cpu"),
        recompute=recompute,
        splits_backward=splits_backward,
        frozen=frozen,
    )


def _batch(shift: int = 0) -> LanguageBatch:
    tokens = (torch.arange(ROWS) * 5 + shift) % 11
    labels = tokens.roll(-1)
    labels[[3, 22, 23]] = NO_LABEL
    return LanguageBatch.of(tokens, labels, torch.arange(ROWS), lengths=(13, 0, 9))


def _loss(part: Part, batch: LanguageBatch) -> Tensor:
    losses = part.language.losses(part.language(batch, {}, None), batch.labels)
    return losses.sum() + sum(batch.aux_losses.losses.values())


def _train(part: Part) -> tuple[dict[str, Tensor], list[LanguageBatch]]:
    """Return the gradients of two microbatches that wait for their backward together, and their batches."""
    batches = [_batch(shift) for shift in range(2)]
    for loss in [_loss(part, batch) for batch in batches]:
        with part.defer_weight_grads() as later:
            loss.backward()
        later()
    return {
        path: gradient for path, one in part.parameters.items() if (gradient := gradient_of(one)) is not None
    }, batches


def _check_same(_rank: int, name: str) -> None:
    config = CONFIGS[name]
    wanted, bound = _train(_build(config, "none"))
    for splits_backward in (False, True):
        for way in WAYS:
            found, ours = _train(_build(config, way, splits_backward=splits_backward))
            assert found.keys() == wanted.keys()
            for path, gradient in wanted.items():
                if splits_backward:
                    torch.testing.assert_close(found[path], gradient, rtol=1e-5, atol=1e-6, msg=path)
                else:
                    assert torch.equal(found[path], gradient), (way, path)
            for one, other in zip(ours, bound, strict=True):
                assert _plain(one.aux_losses.counts) == _plain(other.aux_losses.counts)
                assert _plain(one.aux_losses.losses) == _plain(other.aux_losses.losses)


def _plain(values: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: value.tolist() for name, value in values.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_recomputing_changes_no_bit(run_ranks: Callable[..., list[Any]], name: str) -> None:
    """Gradients, further losses and loads are the same bits, whatever is recomputed; split, they agree to rounding."""
    run_ranks(1, _check_same, name)


class _Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.addmm_.default)
        return func(*args, **(kwargs or {}))


def _count(part: Part) -> tuple[Counter[str], int, int]:
    """Return how often each submodule ran forward and backward together, products in all, and those deferred."""
    runs = Counter[str]()

    def watch(path: str) -> Callable[..., None]:
        return lambda *_given: runs.update([path])

    hooks = [module.register_forward_pre_hook(watch(path)) for path, module in part.module.named_modules()]
    with _Products() as products:
        loss = _loss(part, _batch())
        with part.defer_weight_grads() as later:
            loss.backward()
        at_once = products.count
        later()
    for hook in hooks:
        hook.remove()
    return runs, products.count, products.count - at_once


def _check_counts(_rank: int) -> None:
    each, layers = 7, DENSE.layers
    forward = each * layers + 1
    for splits_backward in (False, True):
        for way, norms, activations, repeated in (
            ("none", 1, 1, 0),
            ("selective", 1, 2, 0),
            ("full", 2, 2, (each - 1) * layers),  # the last product keeps nothing that is not there before it
        ):
            part = _build(DENSE, way, splits_backward=splits_backward)  # type: ignore[arg-type]
            runs, products, later = _count(part)
            for layer in range(layers):
                assert runs[f"layers.{layer}"] == 1  # from outside; checkpoints call its forward
                assert runs[f"layers.{layer}.attention_norm"] == norms, way
                assert runs[f"layers.{layer}.mlp.down"] == activations, way
            assert products == 3 * forward + repeated, (way, splits_backward)
            assert later == (forward if splits_backward else 0)


def test_nothing_is_computed_more_often_than_it_must(run_ranks: Callable[..., list[Any]]) -> None:
    """Of four layers each runs once more where all is recomputed, split or not; no product does where a part is."""
    run_ranks(1, _check_counts)


def _gradients(part: Part, others: bool) -> dict[str, Tensor]:
    """Return the gradients of a backward in which, if asked, routers would choose other experts than in the forward."""
    topk = Tensor.topk

    def of_others(scores: Tensor, *given: Any, **named: Any) -> Any:
        return topk(-scores, *given, **named)

    loss = _loss(part, _batch())
    with patch.object(Tensor, "topk", of_others if others else topk):
        loss.backward()
    found = {name: gradient_of(parameter) for name, parameter in part.parameters.items()}
    return {name: local(gradient) for name, gradient in found.items() if gradient is not None}


def _check_ways(_rank: int) -> None:
    ways = list[Dispatch]()
    decide = Dispatch.of.__func__  # type: ignore[attr-defined]  # a class method has one

    def of(cls: type[Dispatch], *given: Any, **named: Any) -> Dispatch:
        ways.append(decide(cls, *given, **named))
        return ways[-1]

    with patch.object(Dispatch, "of", classmethod(of)), patch.object(ExpertAxis, "swap_counts", autospec=True) as swap:
        swap.side_effect = lambda _axis, counts: counts
        found = _gradients(_build(EXPERTS, "full"), others=True)
    first, second, *repeated = ways
    assert len(repeated) == swap.call_count == EXPERTS.layers - EXPERTS.dense_layers
    for one, again in zip((second, first), repeated, strict=True):
        assert torch.equal(one.order, again.order)
        assert one.counts == again.counts
    expected = _gradients(_build(EXPERTS, "none"), others=False)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


def test_rows_go_to_the_same_experts_again(run_ranks: Callable[..., list[Any]]) -> None:
    """And count as they did, even if a router, whose rows differ by rounding, now would choose others.

    Sizes are exchanged once.
    """
    run_ranks(1, _check_ways)


def _kept(config: DecoderConfig, way: Recompute, *, splits_backward: bool = False) -> int:
    """Return the bytes that a forward keeps for its backward, parameters left out."""
    part, kept = _build(config, way, splits_backward=splits_backward), dict[int, int]()
    parameters = {local(parameter).untyped_storage().data_ptr() for parameter in part.parameters.values()}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = _loss(part, _batch())
    assert loss.requires_grad
    return sum(kept.values())


def _check_bytes(_rank: int) -> None:
    for splits_backward in (False, True):
        for config in (DENSE, EXPERTS):
            deeper = attrs.evolve(config, layers=config.layers + 1)
            each = {
                way: _kept(deeper, way, splits_backward=splits_backward)
                - _kept(config, way, splits_backward=splits_backward)
                for way in WAYS
            }
            row = 4 * ROWS  # bytes of a column
            inner = config.intermediate if config is DENSE else 2 * config.intermediate + config.shared_intermediate
            assert each["none"] - each["selective"] >= 2 * inner * row * 22 // 24  # two of four inside each product
            # What a layer chose is read once more by the further losses, a few numbers for each row and expert.
            bound = 4 * config.experts * row
            assert each["full"] <= config.hidden * row + bound
    assert each["none"] > 0


def test_less_is_kept(run_ranks: Callable[..., list[Any]]) -> None:
    """A layer keeps its rows alone where it is recomputed, and far less between its products where only that is."""
    run_ranks(1, _check_bytes)


def _check_without_gradient(_rank: int) -> None:
    for frozen in (False, True):
        part = _build(DENSE, "full", frozen=frozen)
        runs = 0

        def watch(*_given: Any) -> None:
            nonlocal runs
            runs += 1

        part.module.get_submodule("layers.1.mlp_norm").register_forward_pre_hook(watch)
        with torch.set_grad_enabled(frozen):
            hidden = part.language(_batch(), {}, None)
        assert not hidden.requires_grad
        assert runs == 1


def test_without_gradient_nothing_is_recomputed(run_ranks: Callable[..., list[Any]]) -> None:
    """Evaluation runs once, and what is frozen keeps no graph."""
    run_ranks(1, _check_without_gradient)


class Stack(nn.Module):
    """An encoder of PyTorch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(2))

    def forward(self, items: Sequence[Mapping[str, Tensor]]) -> Tensor:
        x = torch.stack([item["row"] for item in items])
        for layer in self.layers:
            x = x + layer(x)
        return x


STRANGE = EncoderSpec(
    name="stack",
    config=object,
    measure=lambda _raw: (1,),
    rows=lambda _config, _size: 1,
    prepare=lambda _config, raw: {"row": raw},
    build=lambda _config, _hidden: Stack(),
    recompute={"full": lambda module: [layer.forward for layer in module.get_submodule("layers").children()]},
)


def _check_third_party(_rank: int) -> None:
    found = []
    for way in ("none", "full"):
        part = build_part(
            STRANGE,
            object(),
            grid=Grid(name="eye", ranks=(0,)),
            seed=1,
            axis=TensorAxis.single(),
            mesh=DeviceMesh("cpu", [0], mesh_dim_names=("tp",)),
            device=torch.device("cpu"),
            hidden=6,
            recompute=way,
            splits_backward=True,
        )
        runs = Counter[str]()
        part.module.get_submodule("layers.1.2").register_forward_pre_hook(lambda *_given, runs=runs: runs.update("x"))
        rows = part.encode([{"row": torch.arange(6.0) / 6}], [(1,)])
        with part.defer_weight_grads() as later:
            rows.square().sum().backward()
        later()
        assert runs["x"] == (2 if way == "full" else 1)
        found.append([own for one in part.parameters.values() if (own := gradient_of(one)) is not None])
    assert len(found[0]) == len(found[1]) == 8
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_layers_of_a_third_party_module_can_be_recomputed(run_ranks: Callable[..., list[Any]]) -> None:
    """Whatever they are made of; they put nothing off, so that all gradients are there at once."""
    run_ranks(1, _check_third_party)


@pytest.mark.parametrize(
    ("support", "text"),
    [
        (
            {},
            r"^modules\.m\.recompute: expected none, since .* 'decoder' has no recomputation, got 'full'\. Leave it",
        ),
        (
            {"selective": list},
            r"^modules\.m\.recompute: expected none or selective, since .* no such .*'full'\. .* set it to 'selective'",
        ),
    ],
)
def test_recomputation_that_a_module_lacks_is_refused(support: Any, text: str) -> None:
    """By the name of the setting, with what would do."""
    spec = attrs.evolve(DECODER, recompute=support)
    with pytest.raises(ConfigError, match=text):
        check_module(spec, DENSE, grid=Grid(name="m", ranks=(0,)), recompute="full")


def _check_bad_methods(_rank: int) -> None:
    wrong: tuple[Callable[[nn.Module], Any], ...] = (lambda module: [module], lambda module: [nn.Linear.forward])
    for methods in wrong:
        spec = attrs.evolve(DECODER, recompute={"full": methods})
        with pytest.raises(
            PluginError, match=r"modules\.language\.plugin: .*bound methods of submodules.* type .*layer\.forw"
        ):
            build_part(
                spec,
                DENSE,
                grid=Grid(name="language", ranks=(0,)),
                seed=1,
                axis=TensorAxis.single(),
                mesh=DeviceMesh("cpu", [0], mesh_dim_names=("tp",)),
                device=torch.device("cpu"),
                recompute="full",
            )


def test_what_is_no_method_of_a_submodule_cannot_be_recomputed(run_ranks: Callable[..., list[Any]]) -> None:
    """A plugin that names something else is refused."""
    run_ranks(1, _check_bad_methods)
