"""The scale of fp16's loss: when it halves and doubles, and that all ranks hold the same one and skip together."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from mimo.hooks import Common
from mimo.optimizer import LearningRate, ModuleParameters
from mimo.optimizer._adamw import LocalAdamWConfig, mimo_register_optimizers
from mimo.optimizer.runtime import SCALING, LocalStats, LossScale, MimoOptimizer, ModuleOptimizer, StepResult
from mimo.topology import Grid, Module, ModuleGraph
from mimo.topology.meshes import Meshes

RATE = LearningRate(lr=0.01)
VISION = Grid(name="vision", ranks=(0, 1, 2), dp=3)
LANGUAGE = Grid(name="language", ranks=(2, 3), tp=2)
GRAPH = ModuleGraph(
    modules=(Module(grid=VISION, trains=(True,)), Module(grid=LANGUAGE, trains=(True,))),
    arrows=(("vision", "language"),),
)
SHAPE = (6, 4)
TOKENS = 7


def test_optimizer_scaling_a_step_that_is_not_finite_halves() -> None:
    """Each one does, and the steps before it count no longer."""
    scaling = LossScale(scale=64.0, growth_steps=3)
    for finite, scale, good in ((True, 64, 1), (True, 64, 2), (False, 32, 0), (False, 16, 0), (True, 16, 1)):
        scaling.update(finite=finite)
        assert (scaling.scale, scaling.good_steps) == (scale, good)


def test_optimizer_scaling_enough_good_steps_in_a_row_double() -> None:
    """Then they are counted anew."""
    scaling = LossScale(scale=2.0**16, growth_steps=3)
    found = []
    for _ in range(7):
        scaling.update(finite=True)
        found.append(scaling.scale)
    assert found == [2.0**16] * 2 + [2.0**17] * 3 + [2.0**18] * 2


@pytest.mark.parametrize(("finite", "end"), [(False, 2.0**-16), (True, 2.0**32)])
def test_optimizer_scaling_ends_somewhere(finite: bool, end: float) -> None:
    """Neither data that is broken for good nor gradients that are zero drive it to zero or infinity."""
    scaling = LossScale(scale=1.0, growth_steps=1)
    for _ in range(100):
        scaling.update(finite=finite)
    assert scaling.scale == end


def test_optimizer_scaling_resumes_where_it_left() -> None:
    """What a checkpoint holds is all that it knows, but for its settings."""
    scaling, other = LossScale(scale=8.0, growth_steps=3), LossScale(scale=2.0**16, growth_steps=3)
    for finite in (False, True, True):
        scaling.update(finite=finite)
    other.load(scaling.state())
    assert other == scaling


def build(rank: int, scaling: LossScale | None) -> MimoOptimizer:
    """Make the optimizer of a rank over a weight of each module; that of language is split over tensor ranks."""
    meshes = Meshes(GRAPH, rank=rank, device_type="cpu")
    (spec,) = mimo_register_optimizers()
    modules = []
    for name in GRAPH.role(rank).places:
        grid = GRAPH.by_name[name].grid
        whole = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
        dim = Replicate() if grid.tp == 1 else Shard(0)
        local = whole.chunk(grid.tp)[grid.coordinates(rank).tp].clone()
        weight = DTensor.from_local(local, meshes.tensor_mesh(grid), [dim], run_check=False)
        part = ModuleParameters(grid=grid, rank=rank, parameters={f"{name}.weight": nn.Parameter(weight)})
        modules.append(
            ModuleOptimizer.build({0: part}, spec=spec, config=LocalAdamWConfig(), learning_rate=RATE, meshes=meshes)
        )
    return MimoOptimizer(
        modules,
        names=["vision", "language"],
        learning_rate=RATE,
        clip=0.05,
        scaling=scaling,
        meshes=meshes,
        device=torch.device("cpu"),
    )


def take(optimizer: MimoOptimizer, rank: int, step: int, *, fault: str = "") -> StepResult:
    """Take a step as a loss that was scaled would have it, with a fault on rank 1, which holds only the encoder."""
    optimizer.zero_gradients()
    for name, module in optimizer.modules.items():
        for parameter in module.part.parameters.values():
            assert isinstance(parameter, DTensor)
            local = parameter.to_local()
            value = torch.randn(local.shape, generator=torch.Generator().manual_seed(step)) * optimizer.loss_scale
            if rank == 1 and fault == "gradient":
                value[0, 0] = math.nan
            parameter.grad = DTensor.from_local(value, parameter.device_mesh, parameter.placements, run_check=False)
        optimizer.reduce(name, 0)
    stats = LocalStats(
        loss=math.inf if rank == 1 and fault == "loss" else 1.0,
        label_weight=TOKENS if rank == 3 and fault != "tokens" else 0,
        rows={"vision": 2, "language": 9} if rank == 2 else {},
    )
    return optimizer.step(step, stats)


def held(optimizer: MimoOptimizer) -> dict[str, Tensor]:
    """Return a copy of this rank's pieces of all weights and states."""
    weights = {f"{name}.{path}": value for name, tree in optimizer.weights().items() for path, value in tree.items()}
    state = optimizer.state()
    states: dict[str, Any] = {
        f"{name}.{path}": value for name in optimizer.modules for path, value in state[name].items()
    }
    return {
        name: (value.to_local() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in {**weights, **states}.items()
    }


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return whether two are equal to the bit."""
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def scaled(rank: int) -> list[tuple[bool, float, float]]:
    """Take steps with and without a scale; return whether they are the same, and the norms."""
    plain, scaling = build(rank, None), build(rank, LossScale(scale=2.0**10, growth_steps=2))
    found = []
    for step in range(1, 6):
        one, other = take(plain, rank, step), take(scaling, rank, step)
        assert one.loss == other.loss
        assert one.norms == other.norms
        assert one.loss_scale is None
        assert other.loss_scale is not None
        found.append((same(held(plain), held(scaling)), one.norm - other.norm, other.loss_scale))
    return found


def test_optimizer_scaling_is_taken_out_of_gradients_again(run_ranks: Callable[..., list[Any]]) -> None:
    """A power of two changes no bit of weights, moments and norms, also where it doubles in between."""
    for found in run_ranks(4, scaled):
        assert found == [(True, 0.0, scale) for scale in (2.0**10, 2.0**10, 2.0**11, 2.0**11, 2.0**12)]


def broken(rank: int, fault: str) -> tuple[list[float | None], bool, bool, float, dict[str, Any]]:
    """Take a good step, one with a fault, and a good one; return the scales, and what became of weights."""
    optimizer, spared = (build(rank, LossScale(scale=64.0, growth_steps=2000)) for _ in range(2))
    stepped = [take(optimizer, rank, 1)]
    before = held(optimizer)
    stepped.append(take(optimizer, rank, 2, fault=fault))
    assert stepped[-1].skipped
    untouched = same(held(optimizer), before)
    stepped.append(take(optimizer, rank, 3))
    for step in (1, 3):
        take(spared, rank, step)
    scaling: Any = optimizer.state()[SCALING]
    return (
        [one.loss_scale for one in stepped],
        untouched,
        same(held(optimizer), held(spared)),
        optimizer.loss_scale,
        {key: value.value for key, value in scaling.items()},
    )


@pytest.mark.parametrize("fault", ["gradient", "loss"])
def test_optimizer_scaling_one_rank_that_is_not_finite_halves_it_everywhere(
    fault: str, run_ranks: Callable[..., list[Any]]
) -> None:
    """Every rank skips and halves, those of other modules too. Else it is as if the step had not been."""
    for scales, untouched, as_if_never, scale, state in run_ranks(4, broken, fault):
        assert scales == [64.0, 64.0, 32.0]
        assert untouched
        assert as_if_never
        assert scale == 32.0
        assert state == {"scale": 32.0, "good_steps": 1}


def test_optimizer_scaling_a_step_without_labels_says_nothing_of_it(run_ranks: Callable[..., list[Any]]) -> None:
    """It is skipped, and neither halves nor counts."""
    for scales, untouched, as_if_never, scale, state in run_ranks(4, broken, "tokens"):
        assert scales == [64.0] * 3
        assert untouched
        assert as_if_never
        assert scale == 64.0
        assert state == {"scale": 64.0, "good_steps": 2}


def resumed(rank: int) -> list[float]:
    """Load the state of a scaled optimizer, and then one without a scale; return what scales the loss."""
    before, after = (build(rank, LossScale(scale=64.0, growth_steps=9)) for _ in range(2))
    take(before, rank, 1, fault="gradient")
    found = []
    for state in (before.state(), build(rank, None).state()):
        after.load(state)
        found.append(after.loss_scale)
    none = build(rank, None)
    none.load({**before.state(), SCALING: {"scale": Common(1.0)}})
    return [*found, none.loss_scale]


def test_optimizer_scaling_goes_over_into_a_resumed_run(run_ranks: Callable[..., list[Any]]) -> None:
    """What a run without one saved leaves it as it is, and a run without one does not read it."""
    assert run_ranks(4, resumed) == [[32.0, 32.0, 1.0]] * 4
