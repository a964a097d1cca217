"""What ranks agree on before they build: a module's fraction, halves that are identical on all ranks, and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from mimo.hooks import ConfigError
from mimo.optimizer import LearningRate, ModuleParameters, Pattern, Rule, Rules, Share
from mimo.optimizer.runtime import LaidOut, ModuleOptimizer, build_together
from mimo.topology import Grid, Module, ModuleGraph
from mimo.topology.meshes import Meshes
from mimo_optimizer_distributed import DISTRIBUTED, DistributedConfig
from mimo_optimizer_hybrid import HYBRID, CpuOffloadConfig, _agreement
from mimo_optimizer_hybrid._agreement import agree
from mimo_optimizer_hybrid._memory import Pool
from mimo_optimizer_hybrid.optimizer import HybridDeviceOptimizer

CPU = torch.device("cpu")
RATE = LearningRate(lr=0.1)
GRIDS = {"vision": (0, 1), "language": (1, 2), "audio": (3,)}
KEYS: dict[str, Any] = {"shard_lanes": 1, "staging_bytes": 0}


def rules(fraction: float | Literal["auto"] | None) -> Rules:
    """Return how a module is stepped: by the plugin with a fraction, or by another one where there is none."""
    if fraction is None:
        return Rules(base=Rule(spec=DISTRIBUTED, config=DistributedConfig(shard_lanes=1), learning_rate=RATE))
    return Rules(base=Rule(spec=HYBRID, config=CpuOffloadConfig(fraction=fraction, **KEYS), learning_rate=RATE))


def build(rank: int, given: Mapping[str, Rules]) -> dict[str, ModuleOptimizer]:
    """Build the optimizers of this rank's modules as a trainer does; 28 parameters of 20 numbers each."""
    graph = ModuleGraph(
        modules=tuple(
            Module(grid=Grid(name=name, ranks=ranks, dp=len(ranks)), trains=(True,), gathers=False)
            for name, ranks in GRIDS.items()
        ),
        arrows=(("vision", "audio"), ("audio", "language")),
    )
    meshes = Meshes(graph, rank=rank, device_type="cpu")
    laid_out = []
    for name, ranks in GRIDS.items():
        if rank in ranks:
            module = nn.ParameterDict({f"weight{index}": nn.Parameter(torch.ones(4, 5)) for index in range(28)})
            part = ModuleParameters(
                grid=graph.by_name[name].grid,
                rank=rank,
                parameters={f"{name}.{path}": value for path, value in module.items()},
                modules=(module,),
            )
            laid_out.append(LaidOut.of({0: part}, given[name], meshes))
    specs = {spec.name: spec for one in given.values() for spec in one.specs}
    return {one.name: one for one in build_together(laid_out, specs.values(), meshes)}


def fraction_of(module: ModuleOptimizer) -> float:
    """Return the share of a module's numbers that the host holds."""
    (stepper,) = module.steppers
    return stepper.optimizer.fraction if isinstance(stepper.optimizer, HybridDeviceOptimizer) else -1.0


def find_fractions(rank: int) -> dict[str, float]:
    """Build on a rank that finds another balance than the others."""
    given = {"vision": rules("auto"), "language": rules("auto"), "audio": rules(None)}
    with patch.object(_agreement, "balanced_fraction", lambda _device, _numbers, **_keys: (rank + 1) / 4):
        return {name: fraction_of(module) for name, module in build(rank, given).items()}


def test_ranks_of_a_module_take_the_mean_of_what_each_has_found(run_ranks: Callable[..., list[Any]]) -> None:
    """Copies of a parameter are then stepped by the same kernel; a rank without the plugin has no say."""
    vision, language = pytest.approx(3 / 8, abs=1 / 28), pytest.approx(5 / 8, abs=1 / 28)
    assert run_ranks(4, find_fractions) == [
        {"vision": vision},
        {"vision": vision, "language": language},
        {"language": language},
        {"audio": -1.0},
    ]


@contextmanager
def one_machine(free: int) -> Iterator[list[int]]:
    """Pretend that all ranks share some memory; give the bytes that have been taken of it."""
    taken: list[int] = []

    def take(numbers: int, _device: torch.device, *, travels: bool = True) -> torch.Tensor:
        taken.append(4 * numbers)
        return torch.zeros(numbers)

    with (
        patch.object(_agreement, "pools", lambda: [Pool(key=1, free=free)]),
        patch("mimo_optimizer_hybrid._host_half.host_buffer", take),
        patch("mimo_optimizer_hybrid._staging.host_buffer", take),
    ):
        yield taken


def build_in(rank: int, free: int, given: Mapping[str, Rules]) -> tuple[str, int]:
    """Build where all ranks have so much memory; return the error of a rank, and what it takes."""
    with one_machine(free) as taken:
        try:
            build(rank, given)
        except ConfigError as error:
            return str(error), sum(taken)
        return "", sum(taken)


HELD = 28 * (3 * 4 * 20 + 4) + 2 * 4 * 32
"""Bytes of a module whose state the host holds: three numbers for each, the counts of steps, and two buffers."""


def test_memory_is_asked_for_by_all_ranks_and_modules_together(run_ranks: Callable[..., list[Any]]) -> None:
    """Two ranks of one module and one of another hold three times what one does: just enough, or too much for all."""
    given = {"vision": rules(1), "language": rules(None), "audio": rules(1)}
    messages = run_ranks(4, build_in, 3 * HELD, given)
    assert [text for text, _ in messages] == [""] * 4
    assert [taken > 0 for _, taken in messages] == [True, True, False, True]
    refusal = (
        "optimizer.fraction: expected a share of the optimizer's state that host memory can hold; it is "
        f"{3 * HELD:,} bytes (20.8 KiB) for ranks 0, 1, 3 together, got {3 * HELD - 1:,} bytes (20.8 KiB) free. "
        "Set fraction lower in the table that chooses this plugin (optimizer, a module's or a pattern's), spread the "
        "state over more data lanes, or run fewer ranks on this machine."
    )
    assert run_ranks(4, build_in, 3 * HELD - 1, given) == [(refusal, 0)] * 4


def test_all_that_one_rank_builds_is_asked_for_at_once(run_ranks: Callable[..., list[Any]]) -> None:
    """A rank in two modules asks for both, and for what patterns of a module give to the plugin."""
    own = rules(None)
    pattern = Pattern(glob="*", table="optimizer", rule=rules(1).base)
    given = {"vision": Rules(base=own.base, patterns=(pattern,)), "language": rules(1), "audio": own}
    assert [text for text, _ in run_ranks(4, build_in, 4 * HELD, given)] == [""] * 4
    for text, taken in run_ranks(4, build_in, 4 * HELD - 1, given):
        assert f"it is {4 * HELD:,} bytes (27.7 KiB) for ranks 0, 1, 2 together, got" in text
        assert not taken


SIZES = (7, 3, 1, 9, 5, 1, 3, 3, 1, 4)


def hosted(rank: int, fraction: float, tied: list[str]) -> list[str]:
    """Return what the host holds of parameters that two ranks cut unevenly, and of copies that both have."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parameters = {}
    for index, rows in enumerate(SIZES):
        whole = torch.zeros(rows, 4)
        placement = Replicate() if index % 3 == 0 else Shard(0)
        local = whole if index % 3 == 0 else [*whole.chunk(2), whole[:0]][rank]
        found = DTensor.from_local(local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())
        parameters[f"model.{index}"] = nn.Parameter(found)
    part = ModuleParameters(
        grid=Grid(name="model", ranks=(0, 1), tp=2), rank=rank, parameters=parameters, tied=frozenset(tied)
    )
    config = CpuOffloadConfig(fraction=fraction, bucket_bytes=64)
    (agreed,) = agree([Share(part=part, config=config)], CPU)
    optimizer = HYBRID.build(part.parameters, agreed, None)  # type: ignore[arg-type]  # it needs no groups
    assert isinstance(optimizer, HybridDeviceOptimizer)
    return list(optimizer._index)


@pytest.mark.parametrize("fraction", [0, 0.2, 0.35, 0.5, 0.65, 0.8, 1])
def test_ranks_whose_pieces_differ_divide_by_the_same_fraction(
    fraction: float, run_ranks: Callable[..., list[Any]]
) -> None:
    """Otherwise the host would step a copy, and the device of another rank the other one."""
    first, second = run_ranks(2, hosted, fraction, [])
    assert first == second


def test_copies_of_another_stage_go_to_the_host_only_with_all(run_ranks: Callable[..., list[Any]]) -> None:
    """They are stepped first, and by the device: what else the other stage holds is not known here."""
    for fraction, count in ((0.99, len(SIZES) - 1), (1, len(SIZES))):
        for names in run_ranks(2, hosted, fraction, ["model.9"]):
            assert len(names) == count
            assert ("model.9" in names) == (fraction == 1)
