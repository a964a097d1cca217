"""The encoder where backward is split, or computes part of the forward again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mimo.model import Stage
from mimo.model.runtime import ContextAxis, Part, TensorAxis, build_part, local
from mimo.topology import Grid, Recompute
from mimo_encoder_vision import VIT, VitConfig

HIDDEN = 10
CONFIG = VitConfig(patch=2, channels=3, width=24, layers=3, heads=6, intermediate=40)
WAYS: tuple[Recompute, ...] = ("none", "selective", "full")
EVERYTHING = (((4, 4), (2, 6), (8, 2)), ((2, 2),), ())


def _stages(
    mesh: DeviceMesh, recompute: Recompute, *, splits_backward: bool, sequence_parallel: bool, stages: int = 2
) -> list[Part]:
    tensor, context = mesh["tp"], ContextAxis.of(mesh.get_group("cp"))
    axis = TensorAxis.of(tensor, sequence_parallel=sequence_parallel)
    grid = Grid(name="eye", ranks=range(stages * mesh.size()), pp=stages, cp=context.size, tp=axis.size)
    return [
        build_part(
            VIT,
            CONFIG,
            grid=grid,
            stage=Stage(stage, stages),
            seed=5,
            axis=axis,
            mesh=tensor,
            device=torch.device("cpu"),
            hidden=HIDDEN,
            context=context,
            recompute=recompute,
            splits_backward=splits_backward,
        )
        for stage in range(stages)
    ]


def _forward(stages: Sequence[Part], sizes: Sequence[tuple[int, int]]) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    items = [{"pixels": torch.randn(1, 3, *size, generator=generator)} for size in sizes]
    hidden = None
    for part in stages:
        hidden = part.encode(items if part.stage.is_first else [], sizes, hidden)
    assert hidden is not None
    return hidden


def _run(stages: Sequence[Part], sizes: Sequence[tuple[int, int]]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the rows and the gradients; weight gradients of one stage come before those of the next."""
    hidden = _forward(stages, sizes)
    gradient = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
    with stages[0].weights_later() as first, stages[-1].weights_later() as last:
        hidden.backward(gradient)
    first()
    last()
    gradients = {}
    for part in stages:
        for name, parameter in part.parameters.items():
            assert parameter.grad is not None, name
            gradients[name] = local(parameter.grad)
    return hidden.detach(), gradients


def _check(_rank: int, cp: int, tp: int, sequence_parallel: bool) -> None:
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()).view(cp, tp), mesh_dim_names=("cp", "tp"))
    for sizes in EVERYTHING:
        usual = _stages(mesh, "none", splits_backward=False, sequence_parallel=sequence_parallel)
        rows, wanted = _run(usual, sizes)
        for way in WAYS:
            for splits_backward in (False, True):
                stages = _stages(mesh, way, splits_backward=splits_backward, sequence_parallel=sequence_parallel)
                again, found = _run(stages, sizes)
                assert torch.equal(again, rows)
                assert found.keys() == wanted.keys()
                for name, gradient in wanted.items():
                    assert torch.equal(found[name], gradient), (way, splits_backward, name)


@pytest.mark.parametrize(
    ("cp", "tp", "sequence_parallel"), [(1, 1, False), (1, 2, False), (1, 2, True), (2, 1, False), (2, 2, True)]
)
def test_recomputing_and_splitting_change_no_bit(
    run_ranks: Callable[..., list[Any]], cp: int, tp: int, sequence_parallel: bool
) -> None:
    """On all ranks, those without rows too, one microbatch has the gradients that it has without either."""
    run_ranks(cp * tp, _check, cp, tp, sequence_parallel)


def _kept(part: Part, sizes: Sequence[tuple[int, int]]) -> int:
    """Return the bytes that a forward keeps for its backward, parameters left out."""
    kept: dict[int, int] = {}
    parameters = {local(parameter).untyped_storage().data_ptr() for parameter in part.parameters.values()}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        hidden = _forward([part], sizes)
    assert hidden.requires_grad
    return sum(kept.values())


def _check_kept(_rank: int) -> None:
    mesh = DeviceMesh("cpu", torch.arange(1).view(1, 1), mesh_dim_names=("cp", "tp"))
    kept = {}
    for way in WAYS:
        (part,) = _stages(mesh, way, splits_backward=False, sequence_parallel=False, stages=1)
        kept[way] = _kept(part, ((16, 16), (8, 8)))
    rows, layers = 64 + 16, CONFIG.layers
    between = 4 * rows * layers * (CONFIG.width + CONFIG.intermediate)  # what attention found, what GELU made
    assert kept["none"] - kept["selective"] >= between
    assert kept["full"] < kept["selective"] / 2


def test_less_is_kept(run_ranks: Callable[..., list[Any]]) -> None:
    """What lies between the products is not kept where it is recomputed, and only its rows of a whole layer."""
    run_ranks(1, _check_kept)


def test_evaluation_computes_nothing_again(run_ranks: Callable[..., list[Any]]) -> None:
    """Without gradient rows come out as ever, and no graph with them."""
    run_ranks(1, _check_evaluation)


def _check_evaluation(_rank: int) -> None:
    mesh = DeviceMesh("cpu", torch.arange(1).view(1, 1), mesh_dim_names=("cp", "tp"))
    usual, again = (_stages(mesh, way, splits_backward=True, sequence_parallel=False) for way in ("none", "full"))
    with torch.no_grad():
        assert torch.equal(_forward(usual, EVERYTHING[0]), _forward(again, EVERYTHING[0]))
        assert not _forward(again, EVERYTHING[0]).requires_grad
