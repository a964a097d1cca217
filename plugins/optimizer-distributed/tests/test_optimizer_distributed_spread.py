"""Gradients and updates of a small stage that is spread over lanes, in all ways to spread it, beside one process."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from lanes import EVERYBODY, SHARDS, Case, Stage, alone, check_identical, config_of, full, lay_out, rows_of, run
from torch import Tensor
from torch.distributed.tensor import DTensor

from mimo.optimizer import DATA
from mimo.topology import REPLICA
from mimo_optimizer_distributed import DISTRIBUTED
from mimo_optimizer_distributed._scatter import Scatter

LANES = (
    (2, 0, (EVERYBODY, EVERYBODY)),
    (3, 0, (EVERYBODY, frozenset({1}))),
    (3, 0, (frozenset({0, 2}), frozenset({0}))),
    (4, 2, (EVERYBODY, frozenset({3}))),
)


@pytest.mark.parametrize(
    ("shard", "lanes", "shard_lanes", "full", "overlaps"),
    [
        pytest.param(shard, *lanes, overlaps, marks=() if (kind + number + overlaps) % 2 == 0 else pytest.mark.soak)
        for kind, shard in enumerate(SHARDS)
        for number, lanes in enumerate(LANES)
        for overlaps in (False, True)
    ],
)
def test_distributed_steps_are_those_of_one_process(
    shard: str, lanes: int, shard_lanes: int, full: Any, *, overlaps: bool, run_ranks: Callable[..., list[Any]]
) -> None:
    """Lanes that run no layer take part, in the last microbatch too; pieces are uneven, and some are empty."""
    case = Case(lanes=lanes, config=config_of(shard, shard_lanes, overlaps=overlaps), full=full)
    found = run_ranks(lanes, run, case)
    true = alone(case)
    for outcome in found:
        check_identical(outcome, true, 1e-5)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(
    ("shard", "lanes", "shard_lanes"),
    [*((shard, lanes, 0) for shard in SHARDS for lanes in (1, 2)), ("optimizer", 2, 1)],
)
def test_distributed_layers_compute_in_bf16_and_masters_stay_fp32(
    shard: str, lanes: int, shard_lanes: int, *, overlaps: bool, run_ranks: Callable[..., list[Any]]
) -> None:
    """Also where nothing is spread, on one lane or in copies: gradients of all microbatches add up in fp32."""
    case = Case(
        lanes=lanes,
        config=config_of(shard, shard_lanes, overlaps=overlaps),
        full=(EVERYBODY, EVERYBODY, frozenset({0})),
        precision="bf16",
    )
    found = run_ranks(lanes, run, case)
    true = alone(case)
    for outcome in found:
        check_identical({"gradients 1": outcome["gradients 1"]}, {"gradients 1": true["gradients 1"]}, 0.05)


@pytest.mark.parametrize("shard", SHARDS)
def test_distributed_frozen_parameters_are_spread_too(shard: str, run_ranks: Callable[..., list[Any]]) -> None:
    """They have no gradient, and those of the others are what they would be."""
    case = Case(lanes=2, config=config_of(shard), full=(EVERYBODY,), frozen="layers.1")
    found = run_ranks(2, run, case)
    true = alone(case)
    for outcome in found:
        check_identical(outcome, true, 1e-5)


def _pieces(rank: int, case: Case) -> dict[str, Any]:
    stage = Stage()
    whole = copy.deepcopy(stage).state_dict()
    part, meshes = lay_out(rank, case, stage)
    prepared = DISTRIBUTED.prepare(part, meshes, case.config)
    assert prepared.parameters is not None
    weight = prepared.parameters["vision.leave.weight"]
    assert isinstance(weight, DTensor)
    held: dict[str, Any] = {"names": weight.device_mesh.mesh_dim_names, "rows": weight.to_local().tolist()}
    stage.leave.register_forward_hook(
        lambda leave, _given, _output: held.update(inside=bool((leave.weight == whole["leave.weight"]).all()))
    )
    prepared.gather(ThreadPoolExecutor(1))
    with prepared.on_compute("forward"):
        stage(torch.zeros(1, 3))
    prepared.synchronize("any")
    after = stage.leave.weight
    assert isinstance(after, DTensor)
    held["after"] = tuple(after.to_local().shape)
    return held


@pytest.mark.parametrize("shard", SHARDS)
def test_distributed_pieces_are_those_of_chunk(shard: str, run_ranks: Callable[..., list[Any]]) -> None:
    """Seven rows over two of four lanes are four and three, twice; settling gives back what was gathered."""
    found = run_ranks(4, _pieces, Case(lanes=4, config=config_of(shard, 2), full=()))
    rows = Stage().leave.weight.tolist()
    assert [held["rows"] for held in found] == [rows[:4], rows[4:]] * 2
    assert found[0]["names"] == (REPLICA, "tp", DATA)
    assert all(held["inside"] for held in found)
    assert [held["after"] for held in found] == [(4, 5), (3, 5)] * 2


def _sums(_rank: int) -> list[Tensor]:
    """Return the gradients that two microbatches add one by one, and both before what was deferred is added."""
    stage, config = Stage(), config_of("optimizer")
    part, meshes = lay_out(0, Case(lanes=1, config=config, full=(), precision="bf16"), stage)
    prepared = DISTRIBUTED.prepare(part, meshes, config)
    found = []
    for microbatches in ((0,), (1,), (0, 1)):
        prepared.gather(ThreadPoolExecutor(1))
        for microbatch in microbatches:
            with prepared.on_compute("forward"):
                y = stage(rows_of(0, microbatch).bfloat16())
            with prepared.on_compute("backward"):
                y.float().square().sum().backward()
        prepared.reduce()
        found.append(torch.cat([full(piece.grad).flatten() for piece in (prepared.parameters or {}).values()]))
        for piece in (prepared.parameters or {}).values():
            piece.grad = None
        prepared.synchronize("any")
    return found


def test_distributed_gradients_of_microbatches_are_added_in_fp32(run_ranks: Callable[..., list[Any]]) -> None:
    """Those too that are there before the backward's weight gradients, which a schedule may defer."""
    ((one, other, both),) = run_ranks(1, _sums)
    assert not torch.equal(one + other, (one + other).bfloat16().float())
    assert torch.equal(both, one + other)


def _run_in_disorder(rank: int, case: Case) -> dict[str, dict[str, Tensor]]:
    """Do so where sums come back in another order on each rank."""
    chance = random.Random(rank)
    Scatter.is_done = property(lambda _sum: chance.random() < 0.3)  # type: ignore[assignment, method-assign]
    return run(rank, case)


def test_distributed_sums_may_come_back_in_any_order(run_ranks: Callable[..., list[Any]]) -> None:
    """What is then summed over copies is of the same parameters on all of them."""
    case = Case(lanes=4, config=config_of("optimizer", 2, overlaps=True), full=(EVERYBODY, EVERYBODY))
    found = run_ranks(4, _run_in_disorder, case)
    true = alone(case)
    for outcome in found:
        check_identical(outcome, true, 1e-5)
