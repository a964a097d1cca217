"""Sums over lanes that begin while a backward runs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from mimo.hooks import RunError
from mimo.optimizer import ModuleParameters
from mimo.optimizer.runtime import InOrder, _replicate, replicate
from mimo.testing import fork_ranks
from mimo.topology import Grid, Module, ModuleGraph
from mimo.topology.meshes import Meshes, as_parameter


class Noted:
    """A sum of the gradients of some leaves, which only takes note."""

    def __init__(self, name: str, leaves: Collection[Tensor], events: list[str]) -> None:
        self.name = name
        self.leaves = leaves
        self.events = events

    def begin(self) -> None:
        self.events.append(f"sum of {self.name}")

    def look(self) -> None:
        """Nothing comes back."""


class Later:
    """Weight gradients that were deferred."""

    def __init__(self, parameters: Collection[Tensor]) -> None:
        self.parameters = parameters
        self.added: Callable[[Tensor], None] = lambda _leaf: None

    def on_grad_accumulation(self, callback: Callable[[Tensor], None]) -> None:
        self.added = callback


def layers_of(events: list[str]) -> tuple[list[nn.Linear], InOrder, Tensor]:
    """Return three layers, their sums from the last to the first, and a loss; gradients of inputs are noted."""
    layers = [nn.Linear(2, 2) for _ in range(3)]
    x = torch.ones(1, 2, requires_grad=True)
    for number, layer in enumerate(layers):
        x = layer(x)
        x.register_hook(lambda _gradient, number=number: events.append(f"backward of {number}"))
    sums = [Noted(str(number), list(layers[number].parameters()), events) for number in (2, 1, 0)]
    return layers, InOrder(sums, name="vision"), x.sum()


def test_in_order_begins_each_sum_as_soon_as_its_gradients_are_final() -> None:
    """While the backward of layers before it has not begun."""
    events: list[str] = []
    _, in_order, loss = layers_of(events)
    with in_order.on_grad_accumulation(None):
        loss.backward()
        events.append("over")
    passes = [f"{what} of {number}" for number in (2, 1, 0) for what in ("backward", "sum")]
    assert events == [*passes, "over"]


def test_in_order_begins_what_no_gradient_came_for_at_the_end_and_in_the_order_of_all() -> None:
    """A layer that is frozen here, or was not run, holds up those behind it, as they would be before it elsewhere."""
    events: list[str] = []
    layers, in_order, _ = layers_of(events)
    events.clear()
    with in_order.on_grad_accumulation(None):
        layers[2](torch.ones(1, 2)).sum().backward()
        layers[0](torch.ones(1, 2)).sum().backward()
        events.append("over")
    assert events == ["sum of 2", "over", "sum of 1", "sum of 0"]


def test_in_order_takes_what_was_not_deferred_for_final() -> None:
    """The backward that deferred the rest has added it."""
    events: list[str] = []
    layers, in_order, _ = layers_of(events)
    later = Later({layers[1].weight})
    with in_order.on_grad_accumulation(later):
        events.append("computes")
        later.added(layers[1].weight)
        events.append("over")
    assert events == ["sum of 2", "computes", "sum of 1", "sum of 0", "over"]


def test_in_order_is_deaf_outside_of_the_last_backward() -> None:
    """Gradients of earlier ones begin nothing, then or later."""
    events: list[str] = []
    layers, in_order, _ = layers_of(events)
    with in_order.on_grad_accumulation(None):
        pass
    events.clear()
    layers[2](torch.ones(1, 2)).sum().backward()
    assert not events


def test_in_order_refuses_a_gradient_that_was_not_final() -> None:
    """It would be missing from the sum that has begun."""
    layers, in_order, loss = layers_of([])

    def add() -> None:
        with in_order.on_grad_accumulation(None):
            loss.backward()
            layers[2](torch.ones(1, 2)).sum().backward()

    with pytest.raises(RunError) as error:
        add()
    assert str(error.value) == (
        "modules.vision: expected a backward that adds to each gradient once, as optimizer.overlap_grad_reduce takes "
        "it for final then, got one that adds to the gradient of a parameter of shape (2,) again. Set "
        "optimizer.overlap_grad_reduce = false for this module."
    )


def _replicated(rank: int, overlaps: bool) -> tuple[list[list[float]], list[str]]:
    """Return the summed gradients of three layers in two steps, in which lane 1 runs some layers or none."""
    _replicate.MESSAGE_BYTES = 8
    grid = Grid(name="vision", ranks=(0, 1), dp=2)
    module = Module(grid=grid, trains=(True,), overlaps=frozenset({"sums"} if overlaps else ()))
    meshes = Meshes(ModuleGraph(modules=(module,), arrows=()), rank=rank, device_type="cpu")
    layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(3))
    named = {f"vision.{name}": parameter for name, parameter in layers.named_parameters()}
    events: list[str] = []
    prepared = replicate(
        ModuleParameters(grid=grid, rank=rank, parameters=named, modules=(layers,)),
        meshes,
        overlaps=overlaps,
        reduced=lambda names: events.extend(sorted(names)),
    )
    found = []
    for runs in ([0, 1, 2], [0, 1, 2] if rank == 0 else []):
        for parameter in named.values():
            parameter.grad = None
        for last in (False, True):
            with prepared.on_grad_accumulation(None, last):
                for number in runs:
                    layers[number](torch.full((1, 1), float(10**number))).sum().backward()
        prepared.reduce()
        found.append([float(parameter.grad) for parameter in named.values() if parameter.grad is not None])
    return found, events


@pytest.mark.parametrize("overlaps", [False, True])
def test_in_order_sums_of_copies_are_those_of_all_lanes(*, overlaps: bool, run_ranks: Callable[..., list[Any]]) -> None:
    """Of every backward of the step, one lane's without the other's too; each parameter is announced once."""
    for found, events in run_ranks(2, _replicated, overlaps):
        assert found == [[4.0, 40.0, 400.0], [2.0, 20.0, 200.0]]
        assert sorted(events) == sorted(2 * [f"vision.{number}.weight" for number in range(3)])


def _messages(rank: int) -> tuple[list[int], list[float]]:
    """Return how many numbers each message of a sum after the last backward has, and one number of each gradient."""
    _replicate.MESSAGE_BYTES = 40
    grid = Grid(name="vision", ranks=(0, 1), dp=2)
    meshes = Meshes(ModuleGraph(modules=(Module(grid=grid, trains=(True,)),), arrows=()), rank=rank, device_type="cpu")
    named = {f"vision.{size}": nn.Parameter(torch.zeros(size)) for size in (6, 50, 3, 8, 2)}
    for parameter in named.values():
        parameter.grad = torch.full_like(parameter, float(rank + 1))
    sizes: list[int] = []
    all_reduce = dist.all_reduce

    def counted(flat: Tensor, **how: Any) -> Any:
        sizes.append(flat.numel())
        return all_reduce(flat, **how)

    with patch.object(dist, "all_reduce", counted):
        replicate(ModuleParameters(grid=grid, rank=rank, parameters=named), meshes).reduce()
    return sizes, [float(parameter.grad.sum()) for parameter in named.values() if parameter.grad is not None]


def test_sums_after_the_last_backward_are_cut_into_messages_too(run_ranks: Callable[..., list[Any]]) -> None:
    """No more than a message, or one parameter, is copied at a time, however large the module is."""
    assert run_ranks(2, _messages) == [([10, 53, 6], [18.0, 150.0, 9.0, 24.0, 6.0])] * 2


def _begun(rank: int) -> list[str]:
    """Return when sums begin of parameters that are DTensors over what layers compute with, as those of modules are."""
    _replicate.MESSAGE_BYTES = 4
    grid = Grid(name="vision", ranks=(0, 1), dp=2)
    module = Module(grid=grid, trains=(True,), overlaps=frozenset({"sums"}))
    meshes = Meshes(ModuleGraph(modules=(module,), arrows=()), rank=rank, device_type="cpu")
    layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(3))
    named = {}
    for name, piece in layers.named_parameters():
        whole = DTensor.from_local(piece.detach(), meshes.tensor_mesh(grid), [Replicate()], run_check=False)
        whole._local_tensor = piece
        named[f"vision.{name}"] = as_parameter(whole, requires_grad=True)
    events: list[str] = []
    part = ModuleParameters(
        grid=grid,
        rank=rank,
        parameters=named,
        modules=(layers,),
        observe=lambda _sums, _stages, gradients: events.extend("sum" for _ in gradients),
    )
    prepared = replicate(part, meshes, overlaps=True)
    with prepared.on_grad_accumulation(None, True):
        x = torch.ones(1, 1)
        for layer in layers:
            x = layer(x)
        x.sum().backward()
        events.append("over")
    prepared.reduce()
    return events


def test_in_order_sums_begin_while_layers_add_to_their_pieces(run_ranks: Callable[..., list[Any]]) -> None:
    """A parameter's gradient is final when autograd has given it to the piece of it that lies here."""
    assert run_ranks(2, _begun) == 2 * [["sum", "sum", "sum", "over"]]


def _versions_after_a_sum(_rank: int, count: int) -> list[int]:
    gradients = [torch.ones(3) for _ in range(count)]
    before = [one._version for one in gradients]
    _replicate.sum_over(dist.group.WORLD, gradients)  # type: ignore[arg-type]
    assert all(one.tolist() == [2.0] * 3 for one in gradients)
    return [one._version - was for one, was in zip(gradients, before, strict=True)]


@pytest.mark.parametrize("count", [1, 2])
def test_whoever_looks_at_a_gradient_sees_that_it_was_summed(count: int) -> None:
    """By its version, one that is summed where it lies too; collectives alone change none."""
    assert all(min(versions) > 0 for versions in fork_ranks(2, _versions_after_a_sum, count))
