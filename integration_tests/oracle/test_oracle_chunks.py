"""The oracle with several stages of a module on each rank, in a loop and in a V, and resuming from one to another."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from cases import Modules, in_turn
from oracle import Oracle
from resuming import check_going_on
from tables import RATE, Table, table
from test_oracle import on

from mimo.testing import Pool

LAYOUTS: dict[str, Modules] = {
    "language pp2": {"vision": on(0, 0), "language": on(1, 2, pp=2, chunks=2)},
    "language pp2, three chunks": {"vision": on(0, 0), "language": on(1, 2, pp=2, chunks=3)},
    "language pp3": {"vision": on(0, 1), "language": on(2, 4, pp=3, chunks=2)},
    "language pp2 dp2": {"vision": on(0, 2), "language": on(2, 5, pp=2, chunks=2)},
    "language pp2 tp2": {"vision": on(0, 0), "language": on(1, 4, pp=2, tp=2, chunks=2)},
    "language pp2 tp2 sp dp2": {
        "vision": on(0, 1, tp=2),
        "language": on(0, 7, pp=2, tp=2, sequence_parallel=True, chunks=2),
    },
    "language pp2 cp2": {"vision": on(0, 0), "language": on(1, 4, pp=2, cp=2, chunks=2)},
    "vision and language, colocated": {"vision": on(0, 1, pp=2, chunks=3), "language": on(0, 1, pp=2, chunks=2)},
    "vision pp2 tp2 sp": {"vision": on(0, 3, pp=2, tp=2, sequence_parallel=True, chunks=3), "language": on(4, 4)},
}


def settings_of(
    modules: Modules, *, schedule: str = "1f1b", microbatches: int = 4, tied: bool = False, **more: Any
) -> Table:
    """Return settings of modules that have at least three layers, as many for each of their stages."""
    count = microbatches if 24 % (modules["language"]["dp"] * microbatches) == 0 else 2
    settings = table(modules, microbatches=count, language={"tied": tied}, **more)
    for keys in settings["modules"].values():
        stages = keys.get("pp", 1) * keys.get("chunks", 1)
        keys["config"] = {**keys["config"], "layers": stages * -(-3 // stages)}
    settings["schedule"] = {"plugin": schedule}
    return settings


@pytest.mark.each("schedule")
@pytest.mark.parametrize(("layout", "schedule"), in_turn(LAYOUTS, ["1f1b", "1f1b-v"]))
def test_chunks_change_nothing(layout: str, schedule: str, oracle: Oracle) -> None:
    """Loss, gradients and weights equal one process, be a tied embedding on two ranks or, in a V, twice on one."""
    # With the usual seed, one gradient cancels so far that rounding alone moves its weight beyond the bound.
    assert oracle.check(settings_of(LAYOUTS[layout], schedule=schedule, tied=True, seed=6)) == ""


@pytest.mark.soak
@pytest.mark.parametrize(("microbatches", "schedule"), in_turn([1, 4], ["1f1b", "1f1b-v"]))
def test_first_and_last_stage_need_not_be_tied(microbatches: int, schedule: str, oracle: Oracle) -> None:
    """Input and output embeddings of their own, and as few as one microbatch."""
    modules = LAYOUTS["language pp2 tp2"]
    assert oracle.check(settings_of(modules, schedule=schedule, microbatches=microbatches)) == ""


@pytest.mark.parametrize(
    ("frozen", "schedule"),
    in_turn([["embedding"], ["layers", "head"], ["embedding", "layers", "head"]], ["1f1b-v", "1f1b"]),
)
def test_stages_of_a_rank_may_be_frozen_apart(frozen: list[str], schedule: str, oracle: Oracle) -> None:
    """A rank may hold stages that train beside some that do not, or only a tied embedding that does."""
    modules = {"vision": on(0, 0), "language": on(1, 4, pp=2, chunks=2, frozen=frozen)}
    assert oracle.check(settings_of(modules, schedule=schedule, tied=True)) == ""


@pytest.mark.parametrize(("pictures", "schedule"), in_turn(["none", "first"], ["1f1b", "1f1b-v"]))
def test_chunks_without_pictures_are_ordinary(pictures: str, schedule: str, oracle: Oracle) -> None:
    """Nothing hangs where lanes, microbatches or the whole step hold no picture."""
    modules = LAYOUTS["vision and language, colocated"]
    assert oracle.check(settings_of(modules, schedule=schedule, tied=True, pictures=pictures)) == ""


MIXED = {"experts": 4, "experts_per_token": 1, "dense_layers": 1, "expert_bias_rate": 0.01, "balance_loss": 0.05}


@pytest.mark.soak
@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-v"])
def test_chunks_may_hold_experts(schedule: str, oracle: Oracle) -> None:
    """Every stage of a rank enters its own further losses and loads, and moves its own biases."""
    modules = {"vision": on(0, 0), "language": on(1, 4, pp=2, ep=2, chunks=2)}
    settings = table(modules, microbatches=2, language={"layers": 4, "router_normalize": False, **MIXED})
    settings["schedule"] = {"plugin": schedule}
    assert oracle.check(oracle.clear(settings)) == ""


RESUMED: dict[str, tuple[str, Modules]] = {
    "loop": ("1f1b", {"vision": on(0, 0), "language": on(1, 4, pp=2, chunks=2)}),
    "v": ("1f1b-v", {"vision": on(0, 1, pp=2, chunks=3), "language": on(0, 3, pp=2, tp=2, chunks=2)}),
    "alone": ("1f1b", {"vision": on(0, 0), "language": on(0, 0)}),
    "one chunk": ("1f1b", {"vision": on(0, 1), "language": on(0, 2, pp=3)}),
}


def stages_of(layout: str, name: str) -> int:
    """Return into how many stages a module is cut."""
    keys = RESUMED[layout][1][name]
    return int(keys.get("pp", 1) * keys.get("chunks", 1))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("v", "v"),
        ("loop", "v"),
        ("v", "alone"),
        *(
            pytest.param(*pair, marks=pytest.mark.soak)
            for pair in (("loop", "loop"), ("one chunk", "v"), ("v", "loop"))
        ),
    ],
)
def test_a_run_goes_on_with_other_chunks(before: str, after: str, tmp_path: Path, pool: Pool) -> None:
    """A checkpoint knows nothing of chunks: the same trajectory from one layout of them to another, or to none."""
    first, second = (settings_of(RESUMED[name][1], schedule=RESUMED[name][0], tied=True) for name in (before, after))
    for settings in (first, second):
        for name in ("vision", "language"):
            settings["modules"][name]["config"]["layers"] = math.lcm(*(stages_of(one, name) for one in (before, after)))
        settings["run"] |= {"steps": 5, "directory": str(tmp_path)}
        settings["optimizer"] |= {"lr_schedule": "cosine", "lr_min": RATE / 100}
    check_going_on(pool, first, second, exactly=before == after)
