"""Parameters of experts, which lie on the expert view of a grid, stepped beside the others of their module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from mimo.optimizer import LearningRate, ModuleParameters
from mimo.optimizer._adamw import LocalAdamWConfig, mimo_register_optimizers
from mimo.optimizer.runtime import LocalStats, MimoOptimizer, ModuleOptimizer
from mimo.topology import Grid, Module, ModuleGraph
from mimo.topology.meshes import Meshes

SHAPES = {"language.experts": (4, 3, 2), "language.whole": (4, 2, 3), "language.norm": (5,), "language.up": (4, 2)}
STEPS, TOKENS, CLIP = 3, 7, 0.05
RATE = LearningRate(lr=0.01)
CONFIG = LocalAdamWConfig(weight_decay=0.1)


def _full(name: str, salt: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)) * 100 + salt)
    return torch.randn(SHAPES[name], generator=generator)


def _reference(_rank: int) -> tuple[dict[str, Tensor], list[float]]:
    weights = {name: nn.Parameter(_full(name, 0)) for name in SHAPES}
    optimizer = torch.optim.AdamW(weights.values(), lr=RATE.lr, betas=CONFIG.betas, eps=CONFIG.eps, weight_decay=0.1)
    norms = []
    for step in range(1, STEPS + 1):
        for name, weight in weights.items():
            weight.grad = _full(name, step) / TOKENS
        norms.append(float(nn.utils.clip_grad_norm_(weights.values(), CLIP)))
        optimizer.step()
    return {name: weight.detach() for name, weight in weights.items()}, norms


def _lay(whole: Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    piece, place = whole, mesh.get_coordinate()
    assert place is not None
    for axis, (placement, at) in enumerate(zip(placements, place, strict=True)):
        if isinstance(placement, Shard):
            pieces = piece.chunk(mesh.size(axis), placement.dim)
            piece = pieces[at] if at < len(pieces) else piece.narrow(placement.dim, 0, 0)
    return DTensor.from_local(
        piece.contiguous().clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _train(rank: int, ep: int, etp: int) -> tuple[dict[str, Tensor], list[float]]:
    grid = Grid(name="language", ranks=range(4), dp=2, tp=2, ep=ep, etp=etp)
    graph = ModuleGraph(modules=(Module(grid=grid, trains=(True,), experts=True),), arrows=())
    meshes = Meshes(graph, rank=rank, device_type="cpu")
    tensor, experts = meshes.tensor_mesh(grid), meshes.expert_mesh(grid)
    layouts: dict[str, tuple[DeviceMesh, list[Placement], int]] = {  # mesh, placements, ranks that share the gradient
        "language.experts": (experts, [Shard(0), Shard(1)], grid.edp),
        "language.whole": (experts, [Shard(0), Replicate()], grid.edp * grid.etp),  # each makes a part of its gradient
        "language.norm": (tensor, [Replicate()], grid.dp),
        "language.up": (tensor, [Shard(0)], grid.dp),
    }
    parameters = {
        name: nn.Parameter(_lay(_full(name, 0), mesh, placements)) for name, (mesh, placements, _) in layouts.items()
    }
    part = ModuleParameters(
        grid=grid,
        rank=rank,
        parameters=parameters,
        experts=frozenset({"language.experts", "language.whole"}),
        summed=frozenset({"language.whole"}),
    )
    (spec,) = mimo_register_optimizers()
    optimizer = MimoOptimizer(
        [ModuleOptimizer.build({0: part}, spec=spec, config=CONFIG, learning_rate=RATE, meshes=meshes)],
        names=["language"], learning_rate=RATE, clip=CLIP, meshes=meshes, device=torch.device("cpu"),
    )  # fmt: skip
    norms = []
    for step in range(1, STEPS + 1):
        for name, (mesh, placements, sharers) in layouts.items():
            parameters[name].grad = _lay(_full(name, step) / sharers, mesh, placements)
        optimizer.reduce("language", 0)
        norms.append(optimizer.step(step, LocalStats(label_weight=0 if rank else TOKENS, rows={"language": 1})).norm)
        optimizer.zero_gradients()
    return {name: _gathered(parameter) for name, parameter in parameters.items()}, norms


def _gathered(parameter: nn.Parameter) -> Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.full_tensor().detach()


@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (4, 1), (1, 2), (2, 2), (1, 4), (1, 1)])
def test_experts_are_summed_over_their_copies_and_counted_once(
    ep: int, etp: int, run_ranks: Callable[..., list[Any]]
) -> None:
    """Spread and cut in any way, empty pieces too, experts step as AdamW in one process does, with the same norm.

    So do those parameters of theirs that lie whole on ranks which each make a part of their gradient.
    """
    ((expected, norms),) = run_ranks(1, _reference)
    for weights, found in run_ranks(4, _train, ep, etp):
        assert found == pytest.approx(norms, rel=1e-6)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-7)
