"""Deferred weight gradients: what is computed when, and that the results are the same."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mimo.model import DECODER, DecoderConfig
from mimo.model.runtime import (
    NO_LABEL,
    GroupedLinear,
    LanguageBatch,
    Linear,
    Part,
    TensorAxis,
    WeightGradQueue,
    build_part,
    gradient_of,
    multiply,
)
from mimo.topology import Grid

T = TypeVar("T")


def noting(done: list[T], what: T) -> Callable[[Tensor | None], Tensor]:
    """Return a weight gradient of one that notes when it is computed."""

    def computed(total: Tensor | None) -> Tensor:
        done.append(what)
        return torch.ones(1) if total is None else total + 1

    return computed


def test_a_deferral_computes_in_order_and_once() -> None:
    """What was deferred is computed when called, first in first out, and then gone."""
    weight_grad_queue, done = WeightGradQueue(), list[int]()
    weight, bias = torch.zeros(1), torch.zeros(1)
    with weight_grad_queue.collect() as first:
        opened = weight_grad_queue.is_collecting
        for number, parameter in enumerate((weight, bias, weight)):
            weight_grad_queue.defer(parameter, noting(done, number))
    with weight_grad_queue.collect() as second:
        weight_grad_queue.defer(weight, noting(done, 7))
    assert (opened, weight_grad_queue.is_collecting) == (True, False)
    assert done == []
    second()
    first()
    first()
    assert done == [7, 0, 1, 2]
    assert (weight.grad, bias.grad) == (torch.tensor([3.0]), torch.tensor([1.0]))


def test_what_was_deferred_adds_up_elsewhere() -> None:
    """Where somebody else hands the sums on."""
    weight_grad_queue, done, sums = WeightGradQueue(), list[int](), dict[Tensor, Tensor]()
    weight = torch.zeros(1)
    for number in range(3):
        with weight_grad_queue.collect() as later:
            weight_grad_queue.defer(weight, noting(done, number))
        later.add_to(sums)
    assert (done, sums[weight], weight.grad) == ([0, 1, 2], torch.tensor([3.0]), None)


def test_a_deferral_names_parameters_and_when_the_last_of_each_is_added() -> None:
    """So that their gradients can be sent while others are still computed."""
    weight_grad_queue, done = WeightGradQueue(), list[str]()
    names = {torch.zeros(1): "weight", torch.zeros(1): "bias"}
    weight, bias = names
    with weight_grad_queue.collect() as later:
        for parameter in (weight, bias, weight):
            weight_grad_queue.defer(parameter, noting(done, f"a part of {names[parameter]}"))
    assert later.parameters == {weight, bias}
    later.on_grad_accumulation(lambda parameter: done.append(f"all of {names[parameter]}"))
    later()
    assert done == ["a part of weight", "a part of bias", "all of bias", "a part of weight", "all of weight"]
    assert not later.parameters


def test_a_deferral_is_closed_by_an_error_too() -> None:
    """A backward that fails leaves nothing open behind it."""
    weight_grad_queue = WeightGradQueue()
    with pytest.raises(ValueError, match="no"), weight_grad_queue.collect():
        raise ValueError("no")
    assert not weight_grad_queue.is_collecting


@attrs.frozen(kw_only=True)
class Case:
    """A product, and how its gradients are asked for."""

    make: Callable[[], nn.Module]
    call: Callable[[nn.Module, Tensor], Tensor] = lambda layer, x: layer(x)
    rows: tuple[int, ...] = (6, 8)
    outputs: slice | None = None


def _grouped(counts: tuple[int, ...], inputs: int = 8, outputs: int = 12, dtype: torch.dtype = torch.float32) -> Case:
    return Case(
        make=lambda: GroupedLinear(len(counts), inputs, outputs).to(dtype),
        call=lambda layer, x: layer(x.to(dtype), counts),
        rows=(sum(counts), inputs),
    )


CASES = {
    "linear": Case(make=lambda: Linear(8, 5)),
    "linear without bias": Case(make=lambda: Linear(8, 5, bias=False)),
    "some outputs": Case(make=lambda: Linear(8, 5), outputs=slice(1, 4)),
    "more dims": Case(make=lambda: Linear(8, 5), rows=(2, 3, 8)),
    "one row": Case(make=lambda: Linear(8, 5), rows=(8,)),
    "no rows": Case(make=lambda: Linear(8, 5), rows=(0, 8)),
    "no outputs": Case(make=lambda: Linear(8, 0)),
    "grouped by the kernel": _grouped((3, 0, 4)),
    "grouped one by one": _grouped((3, 0, 4), inputs=5),
    "grouped in double precision": _grouped((1, 2), dtype=torch.float64),
    "grouped, no rows": _grouped((0, 0)),
}


def _made(case: Case, weight_grad_queue: WeightGradQueue | None) -> nn.Module:
    torch.manual_seed(3)
    layer = case.make()
    assert isinstance(layer, Linear | GroupedLinear)
    if isinstance(layer, Linear):
        layer.outputs = case.outputs
    layer.weight_grad_queue = weight_grad_queue
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer


def _gradients(layer: nn.Module) -> dict[str, Tensor | None]:
    assert all(one.grad is None or one.grad.shape == one.shape for one in layer.parameters())
    return {name: parameter.grad for name, parameter in layer.named_parameters()}


def _check_product(_rank: int, name: str) -> None:
    case = CASES[name]
    weight_grad_queue = WeightGradQueue()
    usual, closed, split = (_made(case, given) for given in (None, weight_grad_queue, weight_grad_queue))
    for microbatch in range(2):
        x = torch.randn(case.rows, generator=torch.Generator().manual_seed(microbatch))
        inputs = [x.clone().requires_grad_() for _ in range(3)]
        wanted, *found = (case.call(layer, x) for layer, x in zip((usual, closed, split), inputs, strict=True))
        assert all(torch.equal(one, wanted) for one in found)
        gradient = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(9)).to(wanted)
        wanted.backward(gradient)
        found[0].backward(gradient)
        before = _gradients(split)
        with weight_grad_queue.collect() as later:
            found[1].backward(gradient)
        for one in inputs[1:]:
            assert one.grad is not None
            assert inputs[0].grad is not None
            assert torch.equal(one.grad, inputs[0].grad)
        for leaf, value in _gradients(split).items():
            assert value is before[leaf] is None or torch.equal(value, before[leaf]), leaf  # type: ignore[arg-type]
        later()
        for leaf, value in _gradients(usual).items():
            ours, late = _gradients(closed)[leaf], _gradients(split)[leaf]
            assert value is not None
            assert ours is not None
            assert late is not None
            assert torch.equal(ours, value), leaf
            torch.testing.assert_close(late, value, rtol=1e-6, atol=1e-6)
            assert microbatch or torch.equal(late, value), leaf


@pytest.mark.parametrize("name", CASES)
def test_a_product_split_equals_it_whole(run_ranks: Callable[..., list[Any]], name: str) -> None:
    """Attached but closed, the bits are today's; open, weights wait until asked, then gradients agree to rounding."""
    run_ranks(1, _check_product, name)


def _check_what_needs_no_gradient(_rank: int) -> None:
    weight_grad_queue = WeightGradQueue()
    frozen, half, whole = (_made(CASES["linear"], weight_grad_queue) for _ in range(3))
    frozen.requires_grad_(False)
    half.get_parameter("weight").requires_grad_(False)
    x = torch.randn(4, 8)
    with weight_grad_queue.collect() as later:
        through = x.clone().requires_grad_()
        (frozen(through).sum() + half(through).sum() + whole(x).sum()).backward()
    assert later.parameters == {half.get_parameter("bias"), *whole.parameters()}
    assert through.grad is not None
    later()
    assert all(parameter.grad is None for parameter in frozen.parameters())
    assert half.get_parameter("weight").grad is None
    ones = torch.ones(4, 5)
    assert torch.equal(half.get_parameter("bias").grad, ones.sum(0))  # type: ignore[arg-type]
    torch.testing.assert_close(whole.get_parameter("weight").grad, ones.T @ x)
    assert not frozen(x).requires_grad
    with torch.no_grad():
        assert not whole(x).requires_grad


def test_only_what_trains_is_deferred(run_ranks: Callable[..., list[Any]]) -> None:
    """Frozen weights put nothing off and pass gradient on; rows that need no gradient get none."""
    run_ranks(1, _check_what_needs_no_gradient)


def _check_memory(_rank: int) -> None:
    weight_grad_queue = WeightGradQueue()
    first, last = _made(CASES["linear"], weight_grad_queue), Linear(5, 5)
    last.weight_grad_queue = weight_grad_queue
    x = torch.randn(4, 8, requires_grad=True)
    hidden = first(x)
    middle = hidden.tanh()
    out = last(middle)
    gone, needed = weakref.ref(hidden), weakref.ref(middle)
    del hidden, middle
    with weight_grad_queue.collect() as later:
        out.sum().backward()
    del out
    gc.collect()
    assert gone() is None
    assert needed() is not None
    later()
    gc.collect()
    assert needed() is None


def test_only_rows_and_gradients_wait(run_ranks: Callable[..., list[Any]]) -> None:
    """Deferred, they leave of the graph only the rows that they read, and those go one by one."""
    run_ranks(1, _check_memory)


CONFIGS = {
    "dense": DecoderConfig(vocabulary=11, hidden=12, layers=3, heads=6, kv_heads=2, intermediate=10, mlp_bias=True),
    "tied": DecoderConfig(vocabulary=11, hidden=12, layers=2, heads=6, intermediate=10, attention_bias=True, tied=True),
    "experts": DecoderConfig(
        vocabulary=11, hidden=8, layers=2, heads=2, intermediate=12, experts=4, shared_intermediate=6, dense_layers=1,
        balance_loss=0.1, z_loss=0.1,
    ),
}  # fmt: skip
DEFERRED = ("query.weight", "output.weight", "mlp.down.weight", "head.weight", "gate.weight", "query.bias")
AT_ONCE = ("norm.weight", "router.weight", "embedding.weight")


def _decoder(config: DecoderConfig, *, splits_backward: bool) -> Part:
    return build_part(
        DECODER,
        config,
        grid=Grid(name="language", ranks=(0,)),
        seed=1,
        axis=TensorAxis.single(),
        mesh=DeviceMesh("cpu", [0], mesh_dim_names=("tp",)),
        expert_mesh=DeviceMesh("cpu", [[0]], mesh_dim_names=("ep", "etp")),
        device=torch.device("cpu"),
        splits_backward=splits_backward,
    )


def _loss(part: Part, shift: int) -> Tensor:
    tokens = (torch.arange(9) * 5 + shift) % 11
    labels = tokens.roll(-1)
    labels[[2, 8]] = NO_LABEL
    batch = LanguageBatch.of(tokens, labels, torch.arange(9), lengths=(5, 0, 3))
    losses = part.language.losses(part.language(batch, {}, None), batch.labels)
    return losses.sum() + sum(batch.aux_losses.losses.values())


def _check_decoder(_rank: int, name: str) -> None:
    usual, split = (_decoder(CONFIGS[name], splits_backward=splits) for splits in (False, True))
    waiting = []
    for microbatch in range(3):
        _loss(usual, microbatch).backward()
        loss = _loss(split, microbatch)
        with split.defer_weight_grads() as later:
            loss.backward()
        waiting.append(later)
    for path, parameter in split.parameters.items():
        if path.endswith(DEFERRED):
            assert gradient_of(parameter) is None, path
        if path.endswith(AT_ONCE):
            assert gradient_of(parameter) is not None, path
    for later in reversed(waiting):
        later()
    for path, parameter in usual.parameters.items():
        ours, wanted = gradient_of(split.parameters[path]), gradient_of(parameter)
        assert ours is not None
        assert wanted is not None
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6, msg=path)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_decoder_split_equals_it_whole(run_ranks: Callable[..., list[Any]], name: str) -> None:
    """With several microbatches waiting at once, products and head deferred, norms, routers and embeddings do not."""
    run_ranks(1, _check_decoder, name)


def _check_without(_rank: int) -> None:
    part = _decoder(CONFIGS["dense"], splits_backward=False)
    loss = _loss(part, 0)
    with part.defer_weight_grads() as later:
        loss.backward()
    found = {path: value.clone() for path, value in _gradients(part.module).items() if value is not None}
    assert len(found) == len(part.parameters)
    later()
    for path, value in _gradients(part.module).items():
        assert value is not None
        assert torch.equal(value, found[path]), path


def test_layers_that_know_of_no_deferral_compute_at_once(run_ranks: Callable[..., list[Any]]) -> None:
    """As a third-party layer does: all gradients are there after the first part, and the second adds nothing."""
    run_ranks(1, _check_without)


def _check_expanded(_rank: int) -> None:
    weight, bias = nn.Parameter(torch.randn(5, 8)), nn.Parameter(torch.randn(5))
    weight_grad_queue = WeightGradQueue()
    x = torch.randn(3, 8, requires_grad=True)
    with weight_grad_queue.collect() as later:
        # The gradient of a sum has strides of zero.
        multiply(x, weight, bias, weight_grad_queue=weight_grad_queue).sum().backward()
    later()
    torch.testing.assert_close(weight.grad, torch.ones(3, 5).T @ x.detach())
    torch.testing.assert_close(bias.grad, torch.full((5,), 3.0))
    experts = GroupedLinear(2, 8, 4)
    experts.weight_grad_queue = weight_grad_queue
    with weight_grad_queue.collect() as later:
        experts(x, (1, 2)).sum().backward()
    later()
    wanted = torch.stack([x.detach()[:1].sum(0).expand(4, 8), x.detach()[1:].sum(0).expand(4, 8)])
    torch.testing.assert_close(experts.weight.grad, wanted)


def test_gradients_without_memory_of_their_own(run_ranks: Callable[..., list[Any]]) -> None:
    """A gradient that is one number seen many times, as that of a sum is, works too."""
    run_ranks(1, _check_expanded)
