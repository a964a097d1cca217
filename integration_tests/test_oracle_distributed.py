"""The oracle where state, gradients or parameters are spread over data lanes, over all of them or over some."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
import torch
from cases import in_turn
from oracle import Oracle, Table, run_layout, scheduled, table, world_of
from pool import Pool
from test_oracle import CLEAR_SEEDS, EMPTY, EXPERTS, FROZEN, LAYOUTS, SLICED, TIED, Modules, on
from test_oracle_schedules import COVER, EVERY, Case

WAYS = [("optimizer", 0), ("full", 2), ("gradients", 0), ("optimizer", 2), ("full", 0), ("gradients", 2)]
"""What is spread, over how many lanes: 0 for all, 2 where two divide them."""
GROUPS: Mapping[str, Mapping[str, Modules]] = {"plain": LAYOUTS, "sliced": SLICED, "tied": TIED, "frozen": FROZEN}


def lanes(keys: Mapping[str, Any]) -> int:
    """Return the data lanes of a module."""
    return int(keys["dp"]) * int(keys.get("cp", 1))


def spreads(modules: Modules) -> bool:
    """Tell whether anything can be spread."""
    return any(lanes(keys) > 1 for keys in modules.values())


def distributed(settings: Table, shard: str, among: int = 0) -> Table:
    """Return settings with the plugin."""
    modules = {
        name: {**keys, "optimizer": {"shard_lanes": among if among and lanes(keys) % among == 0 else 0}}
        for name, keys in settings["modules"].items()
    }
    return {
        **settings,
        "modules": modules,
        "optimizer": {**settings["optimizer"], "plugin": "distributed", "shard": shard},
    }


def named(found: Mapping[str, Mapping[str, Modules]]) -> list[tuple[str, str]]:
    """Return the layouts in which something can be spread."""
    return [(group, layout) for group, all_ in found.items() for layout, modules in all_.items() if spreads(modules)]


@pytest.fixture(scope="module")
def oracle(pool: Pool) -> Oracle:
    """One oracle for all tests here: it computes each model's truth once."""
    return Oracle(pool)


def found(settings: Table, oracle: Oracle) -> str:
    """Return the differences from the oracle, a line each."""
    return "\n".join(oracle.check(settings))


@pytest.mark.parametrize(("case", "way"), in_turn(named(GROUPS), WAYS))
def test_spreading_changes_nothing(case: tuple[str, str], way: tuple[str, int], oracle: Oracle) -> None:
    """Loss, gradients and weights equal one process that steps plain AdamW."""
    modules = GROUPS[case[0]][case[1]]
    count = 4 if 24 % (modules["language"]["dp"] * 4) == 0 else 2
    language = {"tied": True} if case[0] == "tied" else {}
    assert found(distributed(table(modules, microbatches=count, language=language), *way), oracle) == ""


@pytest.mark.parametrize(
    ("layout", "scored"), in_turn([name for name in EXPERTS if name != "one rank"], [*product(WAYS, CLEAR_SEEDS)])
)
def test_experts_are_spread_over_their_own_lanes(
    layout: str, scored: tuple[tuple[str, int], str], oracle: Oracle
) -> None:
    """Experts have fewer lanes than what stands beside them, or none; biases that no gradient trains follow too."""
    way, scores = scored
    language, seed = CLEAR_SEEDS[scores]
    settings = table(EXPERTS[layout], microbatches=2, language=language, seed=seed)
    assert found(distributed(oracle.clear(settings), *way), oracle) == ""


@pytest.mark.parametrize(("layout", "step"), in_turn(EMPTY, [*product(WAYS, [4, 1])]))
@pytest.mark.parametrize("pictures", ["none", "first"])
def test_lanes_without_pictures_take_part(
    layout: str, pictures: str, step: tuple[tuple[str, int], int], oracle: Oracle
) -> None:
    """No lane waits in vain for one that has nothing to compute, in the last microbatch or in any."""
    way, microbatches = step
    settings = table(EMPTY[layout], microbatches=microbatches, pictures=pictures)
    assert found(distributed(settings, *way), oracle) == ""


def _of_schedules() -> list[Any]:
    """Return cases of the cover of schedules, each with one way in turn; the rest for the soak."""
    cases = [case for case in EVERY if case in COVER and spreads(case.modules)]
    return [
        pytest.param(case, way, id=f"{case.name}, {way[0]} over {way[1]}", marks=() if chosen else pytest.mark.soak)
        for number, case in enumerate(cases)
        for place, way in enumerate(WAYS)
        for chosen in [number % 3 == 0 and number // 3 % len(WAYS) == place]
    ]


@pytest.mark.parametrize(("case", "way"), _of_schedules())
def test_every_schedule_can_have_its_parameters_spread(case: Case, way: tuple[str, int], oracle: Oracle) -> None:
    """Chunks, split backwards, passes, recomputation: loss, gradients and weights equal one process."""
    assert found(distributed(oracle.clear(case.settings), *way), oracle) == ""


@pytest.mark.parametrize("shard", ["optimizer", "gradients", "full"])
def test_what_two_stages_of_a_rank_share_is_spread_once(shard: str, oracle: Oracle) -> None:
    """Chunks in a V put the first and the last stage, and so the tied embedding, on the same ranks."""
    modules = {"vision": on(0, 1), "language": on(0, 3, pp=2)}
    settings = scheduled(table(modules, microbatches=2, language={"tied": True}), "zb-v")
    assert found(distributed(settings, shard), oracle) == ""


SHY: dict[str, Modules] = {
    "two lanes": {"vision": on(0, 1, plugin="shy-vit"), "language": on(0, 1)},
    "three lanes": {"vision": on(0, 2, plugin="shy-vit"), "language": on(3, 4)},
    "a projector alone": {"vision": on(0, 2, plugin="shy-vit", frozen=["encoder"]), "language": on(2, 3)},
}


@pytest.mark.parametrize("pictures", ["none", "first"])
@pytest.mark.parametrize(("layout", "way"), in_turn(SHY, [("full", 0), ("gradients", 0), ("optimizer", 0)]))
def test_lanes_that_run_no_layer_take_part(layout: str, way: tuple[str, int], pictures: str, oracle: Oracle) -> None:
    """A stranger's encoder may leave out all layers where it has no picture: then there is no backward to wait in."""
    assert found(distributed(table(SHY[layout], microbatches=4, pictures=pictures), *way), oracle) == ""


@pytest.mark.parametrize("shard", ["optimizer", "full"])
def test_what_is_made_a_step_ahead_is_gathered_too(shard: str, oracle: Oracle) -> None:
    """A frozen encoder's lanes meet in the middle of the step before, pictures or not."""
    modules = {"vision": on(0, 1, frozen=True, prefetch=True), "language": on(1, 2)}
    assert found(distributed(table(modules, microbatches=4, pictures="first"), shard), oracle) == ""


HALVES: dict[str, Modules] = {
    "one rank": {"vision": on(0, 0), "language": on(0, 0)},
    "lanes": {"vision": on(0, 2), "language": on(0, 1)},
    "everything": {"vision": on(0, 3, tp=2, pp=2), "language": on(0, 7, cp=2, tp=2, pp=2, sequence_parallel=True)},
}


@pytest.mark.parametrize(("layout", "shard"), in_turn(HALVES, ["full", "optimizer", "gradients"]))
def test_layers_may_compute_in_bf16(layout: str, shard: str, pool: Pool, oracle: Oracle) -> None:
    """Losses of three steps are those of fp32 to 1e-2; weights stay fp32."""
    settings = table(HALVES[layout], microbatches=2)
    truth = oracle.truth(settings)
    settings["run"]["precision"] = "bf16"
    for outcome in pool.run(world_of(settings), run_layout, distributed(settings, shard)):
        assert outcome.losses == pytest.approx(truth.losses, rel=1e-2)
        assert {value.dtype for value in outcome.weights.values()} == {torch.float32}
