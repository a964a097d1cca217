"""Losses against a generator written out here, and what they are drawn by."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mimo.model import Lora
from mimo.model.runtime import (
    Part,
    TensorAxis,
    build_part,
    compilation_of,
    fold,
    gradient_of,
    item_keys,
    linears,
    normal,
    step_key,
    uniform,
)
from mimo.model.testing import GeneratorSubject
from mimo.topology import Grid
from mimo_generator_flow import FLOW, FlowConfig

HIDDEN = 10
SMALL = FlowConfig(
    height=4, width=6, patch=2, hidden=24, layers=2, heads=6, intermediate=20, drop_condition=0.0, guidance=1.0
)
SPANS = ((0, 3), (2, 2), (2, 6), (5, 6), (0, 6))
"""Of the pictures of the tests: some overlap, one is empty."""


def _keys(count: int) -> Tensor:
    return item_keys(step_key(1, 2), range(count), [0] * count)


def _items(config: FlowConfig, count: int = len(SPANS)) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    shape = (config.channels, config.height, config.width)
    return [{"pixels": torch.rand(shape, generator=generator) * 2 - 1} for _ in range(count)]


def _rows(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(5)).to(dtype).requires_grad_()


def _part(config: FlowConfig, **settings: Any) -> Part:
    part = build_part(
        FLOW,
        config,
        grid=Grid(name="drawer", ranks=(0,)),
        seed=1,
        axis=TensorAxis.single(),
        mesh=DeviceMesh("cpu", [0], mesh_dim_names=("tp",)),
        device=torch.device("cpu"),
        hidden=HIDDEN,
        **settings,
    )
    stir = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for _, parameter in sorted(part.module.named_parameters()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=stir).to(parameter))
    return part


def _losses(
    part: Part, config: FlowConfig, which: Sequence[int] = range(len(SPANS)), *, rows: Tensor | None = None
) -> Tensor:
    items, index = _items(config), torch.tensor(which, dtype=torch.int64)
    return part.target_losses(
        [items[one] for one in which],
        _rows() if rows is None else rows,
        [SPANS[one] for one in which],
        _keys(len(SPANS))[index],
    )


def _reference(
    config: FlowConfig, weights: Mapping[str, Tensor], pixels: Tensor, seen: Tensor, noise: Tensor, time: float
) -> list[Tensor]:
    """Return the losses of one picture: patch by patch, head by head."""

    def linear(name: str, x: Tensor) -> Tensor:
        bias = weights.get(f"{name}.bias")
        return x @ weights[f"{name}.weight"].T + (0 if bias is None else bias)

    def standard(x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + config.norm_eps).sqrt()

    def silu(x: Tensor) -> Tensor:
        return x / (1 + (-x).exp())

    def waves(place: float, width: int) -> list[float]:
        angles = [place / 10000 ** (index / (width // 2)) for index in range(width // 2)]
        return [*map(math.sin, angles), *map(math.cos, angles)]

    width, side = config.hidden, config.patch
    moment = linear("time.down", silu(linear("time.up", torch.tensor(waves(1000 * time, width)))))
    data = []
    for down in range(config.height // side):
        for across in range(config.width // side):
            cut = pixels[:, down * side : (down + 1) * side, across * side : (across + 1) * side]
            data.append(cut.permute(1, 2, 0).reshape(-1))
    places = [
        torch.tensor(waves(down, width // 2) + waves(across, width // 2))
        for down in range(config.height // side)
        for across in range(config.width // side)
    ]
    normed = standard(seen) * weights["connector.norm.weight"] + weights["connector.norm.bias"]
    read = linear("connector.project", normed) if len(seen) else weights["connector.null.weight"]
    embedded = [
        linear("patch", (1 - time) * noise[index] + time * data[index]) + places[index] for index in range(len(data))
    ]
    x = torch.cat((read, torch.stack(embedded)))
    head = width // config.heads
    for layer in range(config.layers):
        path = f"layers.{layer}"
        shift, scale, gate, later_shift, later_scale, later_gate = linear(f"{path}.modulation", silu(moment)).chunk(6)
        y = standard(x) * (1 + scale) + shift
        query, key, value = (linear(f"{path}.attention.{name}", y) for name in ("query", "key", "value"))
        heads = []
        for index in range(config.heads):
            own = slice(index * head, (index + 1) * head)
            scores = (query[:, own] @ key[:, own].T / math.sqrt(head)).softmax(-1)
            heads.append(scores @ value[:, own])
        x = x + gate * linear(f"{path}.attention.output", torch.cat(heads, 1))
        middle = linear(f"{path}.mlp.up", standard(x) * (1 + later_scale) + later_shift)
        middle = middle * 0.5 * (1 + (math.sqrt(2 / math.pi) * (middle + 0.044715 * middle**3)).tanh())
        x = x + later_gate * linear(f"{path}.mlp.down", middle)
    shift, scale = linear("modulation", silu(moment)).chunk(2)
    velocity = linear("output", standard(x[len(read) :]) * (1 + scale) + shift)
    return [(velocity[index] - (data[index] - noise[index])).square().mean() for index in range(len(data))]


@pytest.mark.parametrize("time", ["uniform", "logit_normal"])
def test_losses_are_those_of_the_model_written_out(run_ranks: Callable[..., list[Any]], time: str) -> None:
    """Losses and gradients of all weights and rows, from noise and times of each picture's key."""
    run_ranks(1, _check_reference, time)


def _check_reference(_rank: int, time: Any) -> None:
    config = attrs.evolve(SMALL, time=time)
    part, rows = _part(config), _rows()
    losses = _losses(part, config, rows=rows)
    losses.sum().backward()
    weights = {name: one.detach().clone().requires_grad_() for name, one in part.module.named_parameters()}
    keys, seen = _keys(len(SPANS)), _rows()
    draws = normal(fold(keys, 1), 1).sigmoid() if time == "logit_normal" else uniform(fold(keys, 1), 1)
    noise = normal(fold(keys, 0), 6 * 12).view(-1, 6, 12)
    wanted = [
        loss
        for item, span, own, moment in zip(_items(config), SPANS, noise, draws, strict=True)
        for loss in _reference(config, weights, item["pixels"], seen[slice(*span)], own, float(moment))
    ]
    torch.testing.assert_close(losses, torch.stack(wanted), rtol=1e-5, atol=1e-5)
    torch.stack(wanted).sum().backward()
    torch.testing.assert_close(rows.grad, seen.grad, rtol=1e-4, atol=1e-5)
    for name, parameter in part.module.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-4, atol=1e-4, msg=name)


def test_a_picture_has_the_same_losses_in_any_batch(run_ranks: Callable[..., list[Any]]) -> None:
    """To 1e-6, with other pictures, in another order, and alone; another key gives others."""
    run_ranks(1, _check_batches)


def _check_batches(_rank: int) -> None:
    config = attrs.evolve(SMALL, drop_condition=0.5)
    part = _part(config)
    every = _losses(part, config).view(len(SPANS), -1)
    for batch in ([3], [4, 1, 0], [2, 3, 1, 0, 4]):
        found = _losses(part, config, batch).view(len(batch), -1)
        torch.testing.assert_close(found, every[torch.tensor(batch)], rtol=1e-6, atol=1e-6)
    assert torch.equal(_losses(part, config), every.flatten())
    other = part.target_losses(_items(config), _rows(), SPANS, _keys(len(SPANS)) + 1).view(len(SPANS), -1)
    assert not bool((other == every).any())


def test_rows_are_dropped_by_key(run_ranks: Callable[..., list[Any]]) -> None:
    """As often as settings say; such a picture has the losses of one of no row. In evaluation none is."""
    run_ranks(1, _check_dropped)


def _check_dropped(_rank: int) -> None:
    rate, count = 0.3, 200
    config = attrs.evolve(SMALL, layers=1, drop_condition=rate)
    part, items, keys, rows = _part(config), _items(config, count), _keys(count), _rows()
    drawn = part.target_losses(items, rows, [(0, 3)] * count, keys).view(count, -1)
    part.module.eval()
    own, without = (part.target_losses(items, rows, [span] * count, keys).view(count, -1) for span in ((0, 3), (0, 0)))
    dropped = uniform(fold(keys, 2), 1) < rate
    torch.testing.assert_close(drawn, torch.where(dropped, without, own), rtol=1e-6, atol=1e-6)
    assert abs(float(dropped.float().mean()) - rate) < 0.1
    assert not bool((own == without).any())


def test_no_pictures_have_a_graph_too(run_ranks: Callable[..., list[Any]]) -> None:
    """Every parameter, and the rows, get a gradient of zeros."""
    run_ranks(1, _check_empty)


def _check_empty(_rank: int) -> None:
    for rows in (_rows(), torch.zeros(0, HIDDEN, requires_grad=True)):
        part = _part(SMALL)
        losses = part.target_losses([], rows, [], _keys(0))
        assert (losses.shape, losses.dtype) == ((0,), torch.float32)
        losses.sum().backward()
        assert all(not bool(parameter.grad.any()) for parameter in part.module.parameters())  # type: ignore[union-attr]
        assert rows.grad is not None


def test_low_precision_computes_in_the_type_of_the_parameters(run_ranks: Callable[..., list[Any]]) -> None:
    """Losses are fp32 and near those of fp32, gradients of rows in their own type."""
    run_ranks(1, _check_precision)


def _check_precision(_rank: int) -> None:
    part, rows = _part(SMALL, dtype=torch.bfloat16), _rows(torch.bfloat16)
    losses = _losses(part, SMALL, rows=rows)
    assert losses.dtype == torch.float32
    losses.sum().backward()
    assert rows.grad is not None
    assert rows.grad.dtype == torch.bfloat16
    torch.testing.assert_close(losses, _losses(_part(SMALL), SMALL), rtol=0.1, atol=0.1)


def test_compiled_layers_compute_the_same(run_ranks: Callable[..., list[Any]]) -> None:
    """Each in a graph, for other numbers of rows too, and where nothing is to be computed."""
    run_ranks(1, _check_compiled)


def _check_compiled(_rank: int) -> None:
    usual = _part(SMALL)
    assert compilation_of(FLOW, usual.module, name="drawer").layers == {"FlowLayer": 2}
    for settings in ({}, {"recompute": "full", "splits_backward": True}):
        part = _part(SMALL, compile_backend="eager", **settings)
        for which in (range(len(SPANS)), [1, 2], []):
            torch.testing.assert_close(_losses(part, SMALL, which), _losses(usual, SMALL, which), rtol=1e-5, atol=1e-6)


def test_split_and_recomputed_backwards_give_the_same_gradients(run_ranks: Callable[..., list[Any]]) -> None:
    """To the bit, and what each product's weights learn waits for the call."""
    run_ranks(1, _check_split)


def _check_split(_rank: int) -> None:
    usual = _part(SMALL)
    _losses(usual, SMALL).sum().backward()
    part = _part(SMALL, recompute="full", splits_backward=True)
    losses = _losses(part, SMALL)
    with part.defer_weight_grads() as later:
        losses.sum().backward()
    named = {id(parameter): name for name, parameter in part.module.named_parameters()}
    waiting = {named[id(parameter)] for parameter in later.parameters}
    products = {path for path, _ in linears(part.module)}
    assert waiting == {name for name in named.values() if name.rpartition(".")[0] in products}
    later()
    for name, parameter in usual.module.named_parameters():
        assert torch.equal(part.module.get_parameter(name).grad, parameter.grad), name  # type: ignore[arg-type]


def test_linears_are_adapted_with_dropout(run_ranks: Callable[..., list[Any]]) -> None:
    """Every linear has rows whose keys are known, so what is dropped is the same in any batch."""
    run_ranks(1, _check_adapted)


def _check_adapted(_rank: int) -> None:
    lora = Lora(rank=2, alpha=2.0, targets=("*",), dropout=0.5)
    part = _part(SMALL, lora=lora, frozen=frozenset(FLOW.parts))
    keys = _keys(len(SPANS))
    with part.drawing(items=keys):
        every = _losses(part, SMALL).view(len(SPANS), -1)
    with part.drawing(items=keys[[4, 1]]):
        two = _losses(part, SMALL, [4, 1]).view(2, -1)
    torch.testing.assert_close(two, every[[4, 1]], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(_losses(part, SMALL), every.flatten())
    every.sum().backward()
    learned = {name for name, parameter in part.parameters.items() if gradient_of(parameter) is not None}
    assert learned == {name for name in part.parameters if ".lora." in name}
    linears = (".connector.project.", ".patch.", ".time.up.", ".modulation.", ".attention.query.", ".output.")
    assert all(any(kind in name for name in learned) for kind in linears)


def test_tensor_ranks_draw_the_same(run_ranks: Callable[..., list[Any]]) -> None:
    """With rows dropped too: losses of each rank are the same to the bit, and those of one rank within rounding."""
    (first, second), (whole,) = (run_ranks(ranks, _split_losses) for ranks in (2, 1))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, whole, rtol=1e-6, atol=1e-6)


def _split_losses(_rank: int) -> Tensor:
    config = attrs.evolve(SMALL, drop_condition=0.5)
    images = [Image.new("RGB", (6, 4), colour) for colour in ("red", "green", "blue", "white")]
    subject = GeneratorSubject(spec=FLOW, config=config, hidden=HIDDEN, raw=images)
    ranks = torch.distributed.get_world_size()
    return subject.losses(subject.build(subject.layout(tp=ranks))).detach()
