"""The oracle where a part of the optimizer's state lies in host memory and is stepped there, and runs that go on so."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cases import Modules, in_turn
from jobs import CPU, make_job
from oracle import Oracle
from resuming import check_going_on, check_trajectory, run_and_evaluate, run_steps, same_bits
from tables import Table, scheduled, table, world_of
from test_oracle import SP, on
from test_resume import settings_of
from torch.distributed.tensor import DTensor

from mimo.hooks import ConfigError
from mimo.testing import Pool as Workers
from mimo.trainer import Trainer
from mimo_optimizer_hybrid._memory import Pool
from mimo_optimizer_hybrid.optimizer import HybridDeviceOptimizer

FRACTIONS = (0, 0.3, 1, "auto")
EARLY = {"overlap_grad_reduce": True}
"""So that gradients go down while the backward runs, which is not the default on the CPU."""
SHARDS: Mapping[str, Mapping[str, Any]] = {
    "replicated": {"shard_lanes": 1, **EARLY},
    "optimizer": {"shard": "optimizer"},
    "optimizer, early": {"shard": "optimizer", **EARLY},
    "gradients": {"shard": "gradients", **EARLY},
    "full": {"shard": "full", **EARLY},
    "full over two": {"shard": "full", "shard_lanes": 2},
}
WHOLE = {"shard": "optimizer", "shard_lanes": 1}
SMALL = {"bucket_bytes": 2048, "staging_bytes": 0}
"""So that the small model has many buckets, of which few are staged."""
LAYOUTS: dict[str, Modules] = {
    "one rank": {"vision": on(0, 0), "language": on(0, 0)},
    "colocated lanes": {"vision": on(0, 3), "language": on(0, 3)},
    "disjoint lanes, sequence parallel": {"vision": on(0, 1), "language": on(2, 5, tp=2, **SP)},
    "pipelines in both": {"vision": on(0, 3, pp=2), "language": on(0, 3, pp=2)},
    "context ranks, overlapping": {"vision": on(0, 3, tp=2), "language": on(2, 5, cp=2)},
}
FEW: dict[str, Modules] = {
    "one rank": {"vision": on(0, 0), "language": on(0, 0)},
    "two lanes": {"vision": on(0, 1), "language": on(0, 1)},
}
"""What runs ten steps, twice."""
WAYS = [
    (0.3, "replicated"),
    (1, "full"),
    ("auto", "optimizer, early"),
    (1, "gradients"),
    (0.3, "full over two"),
    (1, "replicated"),
    (0, "optimizer"),
]


def hybrid(settings: Table, fraction: object, shard: str) -> Table:
    """Return settings with the plugin; of an odd number of lanes each holds a copy."""
    modules = {
        name: {
            **keys,
            "optimizer": SHARDS[shard] if keys["dp"] * keys.get("cp", 1) % 2 == 0 else {**SHARDS[shard], **WHOLE},
        }
        for name, keys in settings["modules"].items()
    }
    optimizer = {**settings["optimizer"], "plugin": "cpu-offload", "fraction": fraction, **SMALL}
    return {**settings, "modules": modules, "optimizer": optimizer}


@pytest.mark.parametrize(("layout", "way"), in_turn(LAYOUTS, WAYS))
def test_where_state_lies_changes_nothing(layout: str, way: tuple[object, str], oracle: Oracle) -> None:
    """Loss, gradients and weights equal one process that steps plain AdamW."""
    settings = table(LAYOUTS[layout], microbatches=2)
    assert oracle.check(hybrid(settings, *way)) == ""


@pytest.mark.parametrize(("pictures", "way"), in_turn(["none", "first"], WAYS[:4]))
def test_lanes_without_pictures_wait_for_nobody(pictures: str, way: tuple[object, str], oracle: Oracle) -> None:
    """A module without rows is left alone, though its gradients have been copied; a rank without takes part."""
    settings = table(LAYOUTS["disjoint lanes, sequence parallel"], microbatches=2, pictures=pictures)
    assert oracle.check(hybrid(settings, *way)) == ""


@pytest.mark.soak
@pytest.mark.parametrize(("schedule", "way"), in_turn(["zb-v", "interleaved"], [(1, "replicated"), (0.3, "full")]))
def test_chunks_of_a_rank_are_held_together(schedule: str, way: tuple[object, str], oracle: Oracle) -> None:
    """Several stages on a rank, which share a tied embedding where they lie in a V, and recompute their layers."""
    modules = {"vision": on(0, 1), "language": on(0, 3, pp=2, recompute="full")}
    settings = scheduled(table(modules, microbatches=2, language={"tied": True}), schedule)
    assert oracle.check(hybrid(settings, *way)) == ""


def steps_of(rank: int, settings: Table, steps: int) -> tuple[list[float], dict[str, torch.Tensor], bool]:
    """Train; return losses and norms, all weights and moments, and whether memory is as promised and overlaps."""
    trainer = Trainer(make_job(settings), rank=rank, device=CPU)
    reported, fine = list[float](), True
    for step in range(1, steps + 1):
        info = trainer.train(step)
        reported += [info.loss, info.grad_norm]
        held = info.optimizer_bytes.values()
        fine &= all((one.host, one.device) == (one.host_promised, one.device_promised) for one in held)
        fine &= len(held) == (2 if settings["optimizer"]["plugin"] == "cpu-offload" else 0)
    optimizers = [one.optimizer for module in trainer.optimizer.modules.values() for one in module.steppers]
    state: dict[str, Any] = dict(trainer.model_state())
    state |= {f"optimizer.{name}": tree for name, tree in trainer.optimizer.state().items()}
    values = {f"{module}.{name}": value for module, tree in state.items() for name, value in tree.items()}
    fine &= all(one.overlaps for one in optimizers if isinstance(one, HybridDeviceOptimizer))
    plain = {name: (v.to_local() if isinstance(v, DTensor) else v).clone() for name, v in values.items()}
    return reported, plain, fine


@pytest.mark.parametrize(("case", "fraction"), in_turn([*product(FEW, ["replicated", "full"])], FRACTIONS))
def test_ten_steps_equal_those_of_one_device_to_the_bit(case: tuple[str, str], fraction: object, pool: Workers) -> None:
    """Whatever the host holds: losses, norms, weights and moments are those of the plugin without it."""
    layout, shard = case
    settings = table(FEW[layout], microbatches=2)
    settings["run"]["steps"] = 10
    plain = {**settings, "optimizer": {**settings["optimizer"], "plugin": "distributed", **SHARDS[shard]}}
    expected = pool.run(world_of(settings), steps_of, plain, 10)
    here = {**settings, "optimizer": {**settings["optimizer"], "plugin": "cpu-offload", "fraction": fraction, **SMALL}}
    here["optimizer"] |= SHARDS[shard]
    for ours, right in zip(pool.run(world_of(settings), steps_of, here, 10), expected, strict=True):
        assert ours[0] == right[0]
        assert same_bits(ours[1], right[1])
        assert ours[2]


def beside_adamw(fraction: object) -> Table:
    """Return settings of which the language model alone has the plugin, on ranks of its own."""
    settings = table(LAYOUTS["disjoint lanes, sequence parallel"], microbatches=2)
    own = {"plugin": "cpu-offload", "fraction": fraction, "shard": "full", **EARLY, **SMALL}
    settings["modules"]["language"] = {**settings["modules"]["language"], "optimizer": own}
    return settings


@pytest.mark.parametrize("fraction", [0.5, "auto"])
def test_ranks_without_the_plugin_agree_with_those_that_have_it(fraction: object, oracle: Oracle) -> None:
    """Where it is one module's alone, the others' ranks take part in what it asks, and wait for nobody."""
    assert oracle.check(beside_adamw(fraction)) == ""


def bytes_of(rank: int, settings: Table) -> int:
    """Return what the optimizers of the language model hold in host memory on all its ranks."""
    return Trainer(make_job(settings), rank=rank, device=CPU).train(1).optimizer_bytes["language"].host


def refusal(rank: int, settings: Table, free: int) -> str:
    """Return why a rank is refused of which the machine has so many bytes."""
    with patch("mimo_optimizer_hybrid._agreement.pools", lambda: [Pool(key=1, free=free)]):
        try:
            Trainer(make_job(settings), rank=rank, device=CPU)
        except ConfigError as error:
            return str(error)
    return ""


def test_memory_that_ranks_lack_together_is_refused_on_all(pool: Workers) -> None:
    """Each could have its own share; those that hold nothing are told the same."""
    settings = beside_adamw(1)
    held, *others = pool.run(world_of(settings), bytes_of, settings)
    assert others == [held] * 5
    assert pool.run(world_of(settings), refusal, settings, held) == [""] * 6
    reported, *others = pool.run(world_of(settings), refusal, settings, held - 1)
    assert others == [reported] * 5
    assert reported.startswith(
        "optimizer.fraction: expected a share of the optimizer's state that host memory can hold; it is "
        f"{held:,} bytes ("
    )
    assert f") for ranks 2, 3, 4, 5 together, got {held - 1:,} bytes (" in reported


PLUGINS: Mapping[str, Mapping[str, Any]] = {
    "hybrid 0.3": {"plugin": "cpu-offload", "fraction": 0.3, "shard_lanes": 1, **SMALL},
    "hybrid 1": {"plugin": "cpu-offload", "fraction": 1, "shard_lanes": 1, **SMALL},
    "hybrid full": {"plugin": "cpu-offload", "fraction": 1, "shard": "full", **SMALL},
    "distributed full": {"plugin": "distributed", "shard": "full"},
    "adamw": {"plugin": "adamw"},
}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("before", "after", "layout"),
    [
        ("hybrid 1", "hybrid 1", "colocated lanes"),
        ("adamw", "hybrid 1", "pipelines in both"),
        ("distributed full", "hybrid full", "colocated lanes"),
        pytest.param("hybrid 0.3", "adamw", "colocated lanes", marks=pytest.mark.soak),
        pytest.param("hybrid 1", "hybrid 0.3", "disjoint lanes, sequence parallel", marks=pytest.mark.soak),
        ("hybrid full", "distributed full", "pipelines in both"),
    ],
)
def test_another_plugin_goes_on_to_the_bit(before: str, after: str, layout: str, tmp_path: Path, pool: Workers) -> None:
    """Three steps by one and three by another are six by the other: their states mean the same."""
    first, second = (settings_of(LAYOUTS[layout], tmp_path) for _ in range(2))
    first["optimizer"] |= PLUGINS[before]
    second["optimizer"] |= PLUGINS[after]
    check_going_on(pool, first, second, exactly=True)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("hybrid full", "colocated lanes"), ("adamw", "pipelines in both")),
        (("adamw", "disjoint lanes, sequence parallel"), ("hybrid full", "colocated lanes")),
        pytest.param(("distributed full", "pipelines in both"), ("hybrid 0.3", "one rank"), marks=pytest.mark.soak),
    ],
)
def test_another_layout_goes_on_within_the_law(
    before: tuple[str, str], after: tuple[str, str], tmp_path: Path, pool: Workers
) -> None:
    """What the host holds on each rank is another part of the state then."""
    runs = []
    for plugin, layout in (before, after):
        runs.append(settings_of(LAYOUTS[layout], tmp_path))
        runs[-1]["optimizer"] |= PLUGINS[plugin]
    first, second = runs
    check_going_on(pool, first, second, exactly=False)


@pytest.mark.soak
def test_evaluations_between_steps_change_nothing(pool: Workers) -> None:
    """They wait for what they read, and bring nothing back that a step has changed."""
    settings = table(LAYOUTS["colocated lanes"], microbatches=2)
    settings["run"]["steps"] = 6
    settings["optimizer"] |= PLUGINS["hybrid 1"]
    evaluated = pool.run(world_of(settings), run_and_evaluate, settings)
    check_trajectory(evaluated, pool.run(world_of(settings), run_steps, settings, 1, 6, ""), exactly=True)
