"""The oracle where a part of the optimizer's state lies in host memory and is stepped there, and runs that go on so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import in_turn
from oracle import CPU, Oracle, Table, make_job, scheduled, table, world_of
from pool import Pool
from resuming import Found, check_trajectory, run_and_evaluate, run_and_save, run_steps, same_bits
from test_oracle import SP, Modules, found, on
from test_resume import settings_of
from torch.distributed.tensor import DTensor

from mimo.trainer._engine import Engine
from mimo_optimizer_hybrid.optimizer import HybridDeviceOptimizer

FRACTIONS = (0, 0.3, 1, "auto")
SHARDS: Mapping[str, Mapping[str, Any]] = {
    "replicated": {"shard_lanes": 1},
    "optimizer": {"shard": "optimizer"},
    "gradients": {"shard": "gradients"},
    "full": {"shard": "full"},
    "full over two": {"shard": "full", "shard_lanes": 2},
}
SMALL = {"bucket_bytes": 2048, "staging_bytes": 0}
"""So that the small model has many buckets, of which few are staged."""
LAYOUTS: dict[str, Modules] = {
    "one rank": {"vision": on(0, 0), "language": on(0, 0)},
    "colocated lanes": {"vision": on(0, 3), "language": on(0, 3)},
    "disjoint lanes, sequence parallel": {"vision": on(0, 1), "language": on(2, 5, tp=2, **SP)},
    "pipelines in both": {"vision": on(0, 3, pp=2), "language": on(0, 3, pp=2)},
    "context ranks, overlapping": {"vision": on(0, 3, tp=2), "language": on(2, 5, cp=2)},
}
WAYS = [
    (0.3, "replicated"),
    (1, "full"),
    ("auto", "optimizer"),
    (1, "gradients"),
    (0.3, "full over two"),
    (1, "replicated"),
    (0, "optimizer"),
]


def hybrid(settings: Table, fraction: object, shard: str) -> Table:
    """Return settings with the plugin; lanes that two do not divide are spread over all."""
    modules = {
        name: {
            **keys,
            "optimizer": {**SHARDS[shard], **({} if keys["dp"] * keys.get("cp", 1) % 2 == 0 else {"shard_lanes": 1})},
        }
        for name, keys in settings["modules"].items()
    }
    optimizer = {**settings["optimizer"], "plugin": "hybrid", "fraction": fraction, **SMALL}
    return {**settings, "modules": modules, "optimizer": optimizer}


@pytest.fixture(scope="module")
def oracle(pool: Pool) -> Oracle:
    """One oracle for all tests here: it computes each model's truth once."""
    return Oracle(pool)


@pytest.mark.parametrize(("layout", "way"), in_turn(LAYOUTS, WAYS))
def test_where_state_lies_changes_nothing(layout: str, way: tuple[object, str], oracle: Oracle) -> None:
    """Loss, gradients and weights equal one process that steps plain AdamW."""
    settings = table(LAYOUTS[layout], microbatches=2)
    assert found(hybrid(settings, *way), oracle) == ""


@pytest.mark.parametrize(("pictures", "way"), in_turn(["none", "first"], WAYS[:4]))
def test_lanes_without_pictures_wait_for_nobody(pictures: str, way: tuple[object, str], oracle: Oracle) -> None:
    """A module without rows is left alone, though its gradients have been copied; a rank without takes part."""
    settings = table(LAYOUTS["disjoint lanes, sequence parallel"], microbatches=2, pictures=pictures)
    assert found(hybrid(settings, *way), oracle) == ""


@pytest.mark.parametrize(("schedule", "way"), in_turn(["zb-v", "interleaved"], [(1, "replicated"), (0.3, "full")]))
def test_chunks_of_a_rank_are_held_together(schedule: str, way: tuple[object, str], oracle: Oracle) -> None:
    """Several stages on a rank, which share a tied embedding where they lie in a V, and recompute their layers."""
    modules = {"vision": on(0, 1), "language": on(0, 3, pp=2, recompute="full")}
    settings = scheduled(table(modules, microbatches=2, language={"tied": True}), schedule)
    assert found(hybrid(settings, *way), oracle) == ""


def steps_of(rank: int, settings: Table, steps: int) -> tuple[list[float], dict[str, torch.Tensor], bool]:
    """Train; return losses and norms, all weights and moments, and whether memory is as promised and overlaps."""
    engine = Engine(make_job(settings), rank=rank, device=CPU)
    told, fine = list[float](), True
    for step in range(1, steps + 1):
        info = engine.train(step)
        told += [info.loss, info.grad_norm]
        held = info.optimizer_bytes.values()
        fine &= all((one.host, one.device) == (one.host_promised, one.device_promised) for one in held)
        fine &= len(held) == (2 if settings["optimizer"]["plugin"] == "hybrid" else 0)
    optimizers = [one.optimizer for module in engine.optimizer.modules.values() for one in module.steppers]
    state: dict[str, Any] = dict(engine.model_state())
    state |= {f"optimizer.{name}": tree for name, tree in engine.optimizer.state().items()}
    values = {f"{module}.{name}": value for module, tree in state.items() for name, value in tree.items()}
    fine &= all(one.overlaps for one in optimizers if isinstance(one, HybridDeviceOptimizer))
    plain = {name: (v.to_local() if isinstance(v, DTensor) else v).clone() for name, v in values.items()}
    return told, plain, fine


@pytest.mark.parametrize("shard", ["replicated", "full"])
@pytest.mark.parametrize("layout", ["one rank", "colocated lanes"])
def test_ten_steps_equal_those_of_one_device_to_the_bit(layout: str, shard: str, pool: Pool) -> None:
    """Whatever the host holds: losses, norms, weights and moments are those of the plugin without it."""
    settings = table(LAYOUTS[layout], microbatches=2)
    settings["run"]["steps"] = 10
    plain = {**settings, "optimizer": {**settings["optimizer"], "plugin": "distributed", **SHARDS[shard]}}
    expected = pool.run(world_of(settings), steps_of, plain, 10)
    for fraction in FRACTIONS:
        here = {**settings, "optimizer": {**settings["optimizer"], "plugin": "hybrid", "fraction": fraction, **SMALL}}
        here["optimizer"] |= SHARDS[shard]
        for ours, right in zip(pool.run(world_of(settings), steps_of, here, 10), expected, strict=True):
            assert ours[0] == right[0]
            assert same_bits(ours[1], right[1])
            assert ours[2]


PLUGINS: Mapping[str, Mapping[str, Any]] = {
    "hybrid 0.3": {"plugin": "hybrid", "fraction": 0.3, "shard_lanes": 1, **SMALL},
    "hybrid 1": {"plugin": "hybrid", "fraction": 1, "shard_lanes": 1, **SMALL},
    "hybrid full": {"plugin": "hybrid", "fraction": 1, "shard": "full", **SMALL},
    "distributed full": {"plugin": "distributed", "shard": "full"},
    "adamw": {"plugin": "adamw"},
}


def check(went_on: Sequence[Found], straight: Sequence[Found], *, exactly: bool) -> None:
    """Refuse a run that has gone on otherwise than if it had never stopped."""
    check_trajectory(list(went_on), list(straight), exactly=exactly)


@pytest.mark.parametrize(
    ("before", "after", "layout"),
    [
        ("hybrid 1", "hybrid 1", "colocated lanes"),
        ("hybrid 0.3", "adamw", "colocated lanes"),
        ("adamw", "hybrid 1", "pipelines in both"),
        ("hybrid 1", "hybrid 0.3", "disjoint lanes, sequence parallel"),
        ("distributed full", "hybrid full", "colocated lanes"),
        ("hybrid full", "distributed full", "pipelines in both"),
    ],
)
def test_another_plugin_goes_on_to_the_bit(before: str, after: str, layout: str, tmp_path: Path, pool: Pool) -> None:
    """Three steps by one and three by another are six by the other: their states mean the same."""
    first, second = (settings_of(LAYOUTS[layout], tmp_path) for _ in range(2))
    first["optimizer"] |= PLUGINS[before]
    second["optimizer"] |= PLUGINS[after]
    pool.run(world_of(first), run_and_save, first)
    went_on = pool.run(world_of(second), run_steps, second, 4, 6, str(tmp_path))
    straight = pool.run(world_of(second), run_steps, second, 1, 6, "")
    check(went_on, straight, exactly=True)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("hybrid full", "colocated lanes"), ("adamw", "pipelines in both")),
        (("adamw", "disjoint lanes, sequence parallel"), ("hybrid full", "colocated lanes")),
        (("distributed full", "pipelines in both"), ("hybrid 0.3", "one rank")),
    ],
)
def test_another_layout_goes_on_within_the_law(
    before: tuple[str, str], after: tuple[str, str], tmp_path: Path, pool: Pool
) -> None:
    """What the host holds on each rank is another part of the state then."""
    runs = []
    for plugin, layout in (before, after):
        runs.append(settings_of(LAYOUTS[layout], tmp_path))
        runs[-1]["optimizer"] |= PLUGINS[plugin]
    first, second = runs
    pool.run(world_of(first), run_and_save, first)
    went_on = pool.run(world_of(second), run_steps, second, 4, 6, str(tmp_path))
    check(went_on, pool.run(world_of(second), run_steps, second, 1, 6, ""), exactly=False)


def test_evaluations_between_steps_change_nothing(pool: Pool) -> None:
    """They wait for what they read, and bring nothing back that a step has changed."""
    settings = table(LAYOUTS["colocated lanes"], microbatches=2)
    settings["run"]["steps"] = 6
    settings["optimizer"] |= PLUGINS["hybrid 1"]
    evaluated = pool.run(world_of(settings), run_and_evaluate, settings)
    check(evaluated, pool.run(world_of(settings), run_steps, settings, 1, 6, ""), exactly=True)
