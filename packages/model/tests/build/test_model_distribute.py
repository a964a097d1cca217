"""Parameters in pieces: what lies where, and that gradients reach them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from mimo.model.build.part import distribute
from mimo.model.runtime import Linear, Split, TensorAxis, gradient_of, local
from mimo.topology.meshes import laid_out


def _check_pieces(rank: int) -> None:
    world = dist.get_world_size()
    mesh = DeviceMesh("cpu", range(world), mesh_dim_names=("tp",))
    axis = TensorAxis.of(mesh)
    full = torch.arange(15, dtype=torch.float64).view(5, 3).t().contiguous().t()  # 5 rows over 4 ranks, strides turned
    like = torch.empty(0, dtype=torch.float32)
    for dim, split in ((0, Split(0)), (1, Split(1)), (None, Split(summed=True))):
        piece = distribute(full, split, axis=axis, mesh=mesh, like=like, requires_grad=False)
        assert isinstance(piece, DTensor)
        assert piece.placements == ((Replicate(),) if dim is None else (Shard(dim),))
        assert piece.shape == full.shape
        assert piece.dtype == torch.float32
        pieces = [full] * world if dim is None else [*full.chunk(world, dim), full.narrow(dim, 0, 0)]
        wanted = pieces[min(rank, len(pieces) - 1)]
        assert torch.equal(piece.to_local(), wanted.float())
        assert piece.to_local().is_contiguous()
        assert torch.equal(piece.full_tensor(), full.float())


def test_pieces_are_those_of_torch_chunk(run_ranks: Callable[..., list[Any]]) -> None:
    """A parameter is cut unevenly, even to nothing, and still knows its full shape and value."""
    run_ranks(4, _check_pieces)


def _check_gradients(_rank: int) -> None:
    mesh = DeviceMesh("cpu", [0], mesh_dim_names=("tp",))
    full = torch.ones(3, 2)
    make = partial(distribute, full, Split(0), axis=TensorAxis.single(), mesh=mesh, like=full)
    parameter = make(requires_grad=True)
    gradient = gradient_of(parameter)
    assert gradient is None
    for count in (1, 2, 3):
        (local(parameter).sum() * 2).backward()  # sums hand back gradients without storage of their own
        gradient = gradient_of(parameter)
        assert gradient is not None
        assert torch.equal(gradient, torch.full((3, 2), 2.0 * count))
    assert gradient is not None
    whole = laid_out(gradient, like=parameter)
    assert isinstance(whole, DTensor)
    assert whole.placements == (Shard(0),)
    assert local(whole) is gradient
    with torch.no_grad():
        parameter.add_(1.0)
    assert torch.equal(local(parameter), torch.full((3, 2), 2.0))
    plain = nn.Parameter(full)
    assert local(plain) is plain
    assert not local(make(requires_grad=False)).requires_grad


def test_gradients_add_up_in_the_parameters_layout(run_ranks: Callable[..., list[Any]]) -> None:
    """Several backwards add to what layers compute with, which is what an optimizer changes."""
    run_ranks(1, _check_gradients)


def _check_linear(_rank: int) -> None:
    linear = Linear(3, 6)
    x = torch.randn(4, 3)
    assert linear.bias is not None
    nn.init.normal_(linear.bias)
    whole = linear(x)
    torch.testing.assert_close(whole, x @ linear.weight.T + linear.bias)
    assert torch.equal(linear(x, leave=TensorAxis.single()), whole)
    linear.outputs = slice(2, 4)
    torch.testing.assert_close(linear(x), whole[:, 2:4])
    linear.reset_parameters()
    assert not linear.bias.any()
    torch.manual_seed(0)
    for inputs in (12, 300):
        assert Linear(inputs, 1000).weight.std().item() == pytest.approx((3 * inputs) ** -0.5, rel=0.05)


def test_linear(run_ranks: Callable[..., list[Any]]) -> None:
    """A product with a bias, of all outputs or only some; weights begin with a variance of a third of 1 / inputs."""
    run_ranks(1, _check_linear)
