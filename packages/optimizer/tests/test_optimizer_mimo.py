"""MimoOptimizer over two modules on four ranks against one AdamW over everything in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from mimo.optimizer import LearningRate, ModuleParameters
from mimo.optimizer._adamw import LocalAdamWConfig, mimo_register_optimizers
from mimo.optimizer.runtime import LocalStats, MimoOptimizer, ModuleOptimizer, agree, is_counted
from mimo.topology import Grid, Module, ModuleGraph
from mimo.topology.meshes import Meshes

SHAPES = {"vision.patch": (5, 3), "vision.norm": (4,), "language.up": (5, 4), "language.norm": (3,)}
STEPS = 3
TOKENS = 7
CLIP = 0.05
RATE = LearningRate(lr=0.01)
CONFIG = LocalAdamWConfig(weight_decay=0.1)
VISION = Grid(name="vision", ranks=(0, 1, 2), dp=3)
LANGUAGE = Grid(name="language", ranks=(2, 3), tp=2)
GRAPH = ModuleGraph(
    modules=(Module(grid=VISION, trains=(True,)), Module(grid=LANGUAGE, trains=(True,))),
    arrows=(("vision", "language"),),
)


def full(name: str, salt: int) -> torch.Tensor:
    """Return numbers that depend on a name and ``salt`` only."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) * 100 + salt)
    return torch.randn(SHAPES[name], generator=generator)


def reference(steps: int = STEPS) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return weights and norms of plain clipping and `torch.optim.AdamW` over the mean gradients."""
    weights = {name: nn.Parameter(full(name, 0)) for name in SHAPES}
    optimizer = torch.optim.AdamW(weights.values(), lr=RATE.lr, betas=CONFIG.betas, eps=CONFIG.eps, weight_decay=0.1)
    norms = []
    for step in range(1, steps + 1):
        for name, weight in weights.items():
            weight.grad = full(name, step) / TOKENS
        norms.append(float(nn.utils.clip_grad_norm_(weights.values(), CLIP)))
        optimizer.step()
    return {name: weight.detach() for name, weight in weights.items()}, norms


def build(rank: int, dims: dict[str, int | None], graph: ModuleGraph = GRAPH, **more: Any) -> MimoOptimizer:
    """Make the optimizer of a rank; ``dims`` says along which dimension a parameter is sharded."""
    meshes = Meshes(graph, rank=rank, device_type="cpu")
    (spec,) = mimo_register_optimizers()
    modules = []
    for name in graph.role(rank).places:
        grid = graph.by_name[name].grid
        mesh = meshes.tensor_mesh(grid)
        parameters = {}
        for path, shape in SHAPES.items():
            if path.startswith(name):
                dim = dims.get(path)
                whole = full(path, 0)
                local = (
                    whole if dim is None else list(whole.chunk(grid.tp, dim))[grid.coordinates(rank).tp].contiguous()
                )
                parameters[path] = nn.Parameter(
                    DTensor.from_local(
                        local,
                        mesh,
                        [Replicate() if dim is None else Shard(dim)],
                        run_check=False,
                        shape=torch.Size(shape),
                        stride=whole.stride(),
                    )
                )
        part = ModuleParameters(grid=grid, rank=rank, parameters=parameters, **more)
        stages = {grid.coordinates(rank).pp: part}
        modules.append(ModuleOptimizer.build(stages, spec=spec, config=CONFIG, learning_rate=RATE, meshes=meshes))
    return MimoOptimizer(
        modules,
        names=[module.name for module in graph.modules],
        learning_rate=RATE,
        clip=CLIP,
        meshes=meshes,
        device=torch.device("cpu"),
    )


def give(optimizer: MimoOptimizer, rank: int, step: int) -> None:
    """Hand each parameter this rank's share of its gradient: lanes and tensor ranks of summed ones share it out."""
    for module in optimizer.modules.values():
        place, grid = module.part.place, module.part.grid
        for name, parameter in module.part.parameters.items():
            whole = full(name, step)
            share = grid.dp * (grid.tp if name in module.part.summed else 1)
            assert isinstance(parameter, DTensor)
            (placement,) = parameter.placements
            local = list(whole.chunk(grid.tp, placement.dim))[place.tp] if isinstance(placement, Shard) else whole
            parameter.grad = DTensor.from_local(
                local.contiguous() / share,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        optimizer.reduce(module.part.grid.name, 0)


def local_stats(rank: int, rows: dict[str, int] | None = None, loss: float = 1.0) -> LocalStats:
    """Return a rank's share: tokens on one rank, rows on ranks 0 and 2."""
    counted = {0: {"vision": 2}, 2: {"language": 9}}.get(rank, {}) if rows is None else rows
    return LocalStats(loss=loss, label_weight=TOKENS if rank == 3 else 0, rows=counted)


def train(rank: int) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """Step a few times; return this rank's whole weights, norms and losses."""
    optimizer = build(rank, {"language.up": 0}, summed=frozenset({"language.norm"}))
    norms, losses = [], []
    for step in range(1, STEPS + 1):
        give(optimizer, rank, step)
        stepped = optimizer.step(step, local_stats(rank))
        norms.append(stepped.norm)
        losses.append(stepped.loss)
        optimizer.zero_gradients()
    weights = {
        name: parameter.full_tensor().detach()
        for module in optimizer.modules.values()
        for name, parameter in module.part.parameters.items()
        if isinstance(parameter, DTensor)
    }
    return weights, norms, losses


def test_optimizer_any_placement_equals_one_process(run_ranks: Callable[..., list[Any]]) -> None:
    """Lanes, uneven shards, replicated and partly computed gradients give AdamW's weights, norm and clipping."""
    (expected, norms), *_ = run_ranks(1, lambda _rank: reference())
    for weights, found, losses in run_ranks(4, train):
        assert found == pytest.approx(norms, rel=1e-6)
        assert losses == pytest.approx([4 / TOKENS] * STEPS)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-7)


def skip(rank: int, fault: str) -> tuple[bool, bool, bool]:
    """Take one step with a fault on one rank; return whether it was skipped and which modules changed."""
    optimizer = build(rank, {})
    give(optimizer, rank, 1)
    if fault == "gradient" and rank == 1:
        for parameter in optimizer.modules["vision"].part.parameters.values():
            assert parameter.grad is not None
            parameter.grad.mul_(math.nan)
        optimizer.reduce("vision", 0)
    if fault == "replica" and rank == 3:
        norm = optimizer.modules["language"].part.parameters["language.norm"]
        assert norm.grad is not None
        norm.grad.mul_(math.nan)
    if fault == "loss":
        stepped = optimizer.step(1, local_stats(rank, loss=math.inf if rank == 2 else 1.0))
    elif fault == "tokens":
        stepped = optimizer.step(1, LocalStats(loss=1.0))
    elif fault == "rows":
        stepped = optimizer.step(1, local_stats(rank, rows={"language": 9} if rank == 2 else {}))
    else:
        if fault == "gradient" and rank in (0, 2):
            optimizer.reduce("vision", 0)
        stepped = optimizer.step(1, local_stats(rank))
    changed = {
        name: any(
            not torch.equal(parameter.full_tensor(), full(path, 0))
            for path, parameter in module.part.parameters.items()
            if isinstance(parameter, DTensor)
        )
        for name, module in optimizer.modules.items()
    }
    return stepped.skipped, changed.get("vision", False), changed.get("language", False)


@pytest.mark.parametrize(
    ("fault", "skipped", "vision", "language"),
    [
        ("none", False, True, True),
        ("gradient", True, False, False),
        ("replica", True, False, False),
        ("loss", True, False, False),
        ("tokens", True, False, False),
        ("rows", False, False, True),
    ],
)
def test_optimizer_all_ranks_skip_together(
    fault: str, skipped: bool, vision: bool, language: bool, run_ranks: Callable[..., list[Any]]
) -> None:
    """A NaN on one rank, even in a copy that another rank counts, or no label token, skips everywhere.

    No rows leaves only that module untouched.
    """
    found = run_ranks(4, skip, fault)
    assert [one[0] for one in found] == [skipped] * 4
    assert [one[1] for one in found] == [vision] * 3 + [False]
    assert [one[2] for one in found] == [False, False, language, language]


def missing(rank: int) -> list[bool]:
    """Step once with gradients and once without; return whether the second step saw any gradient."""
    optimizer = build(rank, {})
    give(optimizer, rank, 1)
    optimizer.step(1, local_stats(rank))
    optimizer.zero_gradients()
    for name in optimizer.modules:
        optimizer.reduce(name, 0)
    stepped = optimizer.step(2, local_stats(rank))
    return [stepped.norm == 0.0, stepped.skipped]


def test_optimizer_a_missing_gradient_is_zero_not_the_last_one(run_ranks: Callable[..., list[Any]]) -> None:
    """After a step the old gradients are gone: a step without any has norm 0."""
    assert run_ranks(4, missing) == [[True, False]] * 4


def several(rank: int, order: tuple[int, ...]) -> tuple[list[float], list[float], list[str]]:
    """Reduce two stages of this lane that share a parameter, in some order; return gradients as they come about."""
    grid = Grid(name="language", ranks=(0, 1), dp=2)
    meshes = Meshes(ModuleGraph(modules=(Module(grid=grid, trains=(True,)),), arrows=()), rank=rank, device_type="cpu")
    mesh = meshes.tensor_mesh(grid)

    def made(value: float) -> nn.Parameter:
        found = nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Replicate()], run_check=False))
        found.grad = DTensor.from_local(torch.full((3,), value), mesh, [Replicate()], run_check=False)
        return found

    shared, names = made(1.0), ("language.first", "language.shared", "language.last")
    first, last = made(2.0), made(3.0)
    stages = {
        stage: ModuleParameters(grid=grid, rank=rank, parameters=parameters, tied=frozenset({"language.shared"}))
        for stage, parameters in {
            0: {"language.first": first, "language.shared": shared},
            3: {"language.last": last, "language.shared": shared},
        }.items()
    }
    (spec,) = mimo_register_optimizers()
    module = ModuleOptimizer.build(stages, spec=spec, config=CONFIG, learning_rate=RATE, meshes=meshes)
    optimizer = MimoOptimizer(
        [module], names=["language"], learning_rate=RATE, clip=0.0, meshes=meshes, device=torch.device("cpu")
    )

    def gradients() -> list[float]:
        return [float(value.grad.to_local()[0]) for value in (first, shared, last) if isinstance(value.grad, DTensor)]

    optimizer.reduce("language", order[0])
    between = gradients()
    optimizer.reduce("language", order[1])
    assert {name: is_counted(module.part, name) for name in names} == dict.fromkeys(names, rank == 0)
    stepped = optimizer.step(1, LocalStats(label_weight=1, rows={"language": 1}))
    assert stepped.norm == pytest.approx(math.sqrt(3 * (4**2 + 2**2 + 6**2)) / 2, rel=1e-6)
    return between, [2 * one for one in gradients()], sorted(optimizer.state()["language"])


@pytest.mark.parametrize(("order", "between"), [((0, 3), [4.0, 1.0, 3.0]), ((3, 0), [2.0, 1.0, 6.0])])
def test_optimizer_stages_are_reduced_one_by_one_and_what_they_share_with_the_last(
    order: tuple[int, ...], between: list[float], run_ranks: Callable[..., list[Any]]
) -> None:
    """Each stage of a rank sums its own when its turn comes; a parameter of both is summed, counted and kept once."""
    for before, after, state in run_ranks(2, several, order):
        assert before == between
        assert after == [4.0, 2.0, 6.0]
        names = ("first", "last", "shared")
        assert state == [f"{name}.{key}" for name in names for key in ("exp_avg", "exp_avg_sq", "step")]


def tied(rank: int) -> tuple[float, list[float]]:
    """Add up the two stages' gradients of a parameter that both hold; return its norm and the new values."""
    grid = Grid(name="language", ranks=(0, 1), pp=2)
    graph = ModuleGraph(modules=(Module(grid=grid, trains=(True, True), tied=True),), arrows=())
    optimizer = build(rank, {}, graph, tied=frozenset({"language.norm"}))
    parameters = optimizer.modules["language"].part.parameters
    parameters["language.norm"].grad = None
    for name, parameter in parameters.items():
        assert isinstance(parameter, DTensor)
        value = torch.full(SHAPES[name], float(rank + 1) if name == "language.norm" else 0.0)
        parameter.grad = DTensor.from_local(value, parameter.device_mesh, parameter.placements, run_check=False)
    optimizer.reduce_tied("language")
    optimizer.reduce("language", rank)
    stepped = optimizer.step(1, LocalStats(label_weight=1 if rank else 0, rows={"language": 1}))
    norm = parameters["language.norm"]
    assert isinstance(norm, DTensor)
    return stepped.norm, norm.to_local().tolist()


def test_optimizer_tied_parameter_is_summed_over_stages_and_counted_once(run_ranks: Callable[..., list[Any]]) -> None:
    """Both stages take the same step with the sum of their gradients, whose norm counts once."""
    (first, values), (second, others) = run_ranks(2, tied)
    assert first == second == pytest.approx(math.sqrt(3 * 3.0**2))
    assert values == others


def stopping(rank: int) -> tuple[int, int]:
    """Return how many ranks are to stop, in a step before one of them receives the signal, and in that step."""
    stats = (LocalStats(loss=math.nan), LocalStats(loss=math.nan) + LocalStats(stops=int(rank == 2)))
    found = [agree(one, squares={}, modules=("language",), counts=(), device=torch.device("cpu")) for one in stats]
    return found[0].stops, found[1].stops


def test_optimizer_all_ranks_hear_that_one_is_to_stop(run_ranks: Callable[..., list[Any]]) -> None:
    """In the step's one message, whatever else is in it."""
    assert run_ranks(3, stopping) == [(0, 1)] * 3


def test_optimizer_states_that_are_numbers_come_back(run_ranks: Callable[..., list[Any]]) -> None:
    """An optimizer may count in plain numbers: a checkpoint gives them back as such."""

    def work(rank: int) -> list[object]:
        optimizer = build(rank, {})
        states = [
            stepper.optimizer.state[parameter]
            for module in optimizer.modules.values()
            for stepper in module.steppers
            for parameter in module.part.parameters.values()
        ]
        for state in states:
            state["rounds"] = 3
        saved = optimizer.state()
        for state in states:
            state["rounds"] = 5
        optimizer.load(saved)
        return [state["rounds"] for state in states]

    assert {value for found in run_ranks(4, work) for value in found} == {3}
