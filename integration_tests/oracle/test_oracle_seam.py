"""An encoder whose frozen tower works a step ahead while its projector trains in the step."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from cases import Modules
from devices import run_as_on_devices
from jobs import CPU, make_job
from oracle import Oracle
from rerunning import events, with_rerun
from rerunning import run as run_again
from resuming import Found, check_going_on, check_trajectory, run_and_evaluate, run_steps
from tables import SCHEDULES, Table, scheduled, table, world_of
from test_oracle_distributed import Way, distributed
from test_oracle_prefetch import LAYOUTS as AHEAD
from test_oracle_prefetch import run_counted, run_torn
from test_rerun import STEP, check_same, settings_of

from mimo.testing import Pool
from mimo.trainer import Trainer
from mimo.trainer.runtime import estimate_memory

LAYOUTS: dict[str, Modules] = {name: modules for name, modules in AHEAD.items() if name != "two encoders, both ahead"}


def seamed(layout: str, *, factor: int = 1, pictures: str = "mixed", schedule: str = "1f1b") -> Table:
    """Return settings of a layout with an encoder whose tower is frozen and works ahead of its projector."""
    modules: dict[str, dict[str, Any]] = {name: dict(keys) for name, keys in LAYOUTS[layout].items()}
    modules["vision"] |= {"frozen": ["encoder"], "prefetch": True, "batch_factor": factor}
    return scheduled(table(modules, microbatches=4, pictures=pictures), schedule)


def some(names: Iterable[Any], values: Sequence[Any], usual: Mapping[Any, Any]) -> list[Any]:
    """Return the product as parameters, all but the usual ones for the soak."""
    return [
        pytest.param(name, value, marks=() if usual.get(name) == value else pytest.mark.soak)
        for name in names
        for value in values
    ]


USUAL = {"colocated, pipelines in both": 1, "two encoders, one trains": 2, "overlapping, vision tp2": 2}


@pytest.mark.parametrize(("layout", "factor"), some(LAYOUTS, [1, 2], USUAL))
def test_a_projector_trains_on_rows_made_a_step_ahead(layout: str, factor: int, oracle: Oracle) -> None:
    """Loss, gradients and weights after three steps equal one process, however tower and projector lie and serve."""
    assert oracle.check(seamed(layout, factor=factor)) == ""


@pytest.mark.soak
@pytest.mark.parametrize(
    "layout", ["colocated, vision tp2, language tp2 pp2", "vision cp3 pp2, language cp2 dp2, overlapping"]
)
def test_branches_of_gpus_change_nothing(layout: str, pool: Pool, truths: Path) -> None:
    """Where each channel has a communicator of its own, none is made between a tower and its projector."""
    assert Oracle(pool, truths, layout=run_as_on_devices).check(seamed(layout, factor=2)) == ""


def in_its_step(settings: Table) -> Table:
    """Return settings whose tower works in the step of its projector."""
    found = copy.deepcopy(settings)
    found["modules"]["vision"]["prefetch"] = False
    return found


PIPELINED = ["disjoint, language pp2", "colocated, pipelines in both", "overlapping, vision tp2"]


@pytest.mark.soak
@pytest.mark.parametrize("layout", PIPELINED)
@pytest.mark.parametrize("schedule", sorted(SCHEDULES.keys() - {"1f1b"}))
def test_any_schedule_may_have_a_tower_ahead(schedule: str, layout: str, oracle: Oracle) -> None:
    """So they do by every other order of work."""
    assert oracle.check(seamed(layout, factor=2, schedule=schedule)) == ""


@pytest.mark.parametrize(
    ("layout", "pictures"), some(PIPELINED, ["first", "none"], {"overlapping, vision tp2": "first"})
)
def test_a_step_without_pictures_is_ordinary(layout: str, pictures: str, oracle: Oracle) -> None:
    """Towers and projectors may have nothing to do in some passes, or all."""
    assert oracle.check(seamed(layout, factor=2, pictures=pictures)) == ""


VARIANTS: dict[str, Any] = {
    "ahead": {"schedule": {"plugin": "ahead"}},
    "zero-bubble, resampled": {
        "schedule": {"plugin": "zero-bubble", "form": "h1"},
        "projector": {"kind": "resampler", "hidden": 12, "heads": 6, "queries": 3, "layers": 1},
    },
    "bf16": {"run": {"precision": "bf16"}, "way": Way("optimizer")},
    "recomputed": {"vision": {"recompute": "full"}},
    "low rank": {"vision": {"frozen": True, "lora": {"rank": 2, "targets": ["projector.*"]}}},
    "spread, full": {"way": Way("full")},
    "spread, overlaps": {"way": Way("gradients", overlaps=True)},
    "host": {"optimizer": {"plugin": "cpu-offload", "fraction": 0.5, "bucket_bytes": 2048, "staging_bytes": 0}},
}


def varied(layout: str, variant: str) -> Table:
    """Return settings of a layout with something else beside them."""
    settings, more = seamed(layout, factor=2), VARIANTS[variant]
    for section in ("run", "optimizer"):
        settings[section] |= more.get(section, {})
    settings["modules"]["vision"] |= more.get("vision", {})
    if "projector" in more:
        config = settings["modules"]["vision"]["config"]
        settings["modules"]["vision"]["config"] = {**config, "projector": more["projector"]}
    settings["schedule"] = more.get("schedule", settings["schedule"])
    return distributed(settings, more["way"]) if "way" in more else settings


@pytest.mark.parametrize(
    ("variant", "layout"),
    some(
        VARIANTS,
        ["disjoint, lanes 2 to 3", "colocated, vision tp2, language tp2 pp2"],
        {"spread, full": "disjoint, lanes 2 to 3"},
    ),
)
def test_a_step_ahead_changes_no_bit(variant: str, layout: str, pool: Pool) -> None:
    """Losses, norms, weights and moments are those of the same layout with the tower in the projector's step."""
    settings = varied(layout, variant)
    world = world_of(settings)
    found = pool.run(world, run_steps, settings, 1, 3, "")
    check_trajectory(found, pool.run(world, run_steps, in_its_step(settings), 1, 3, ""), exactly=True)


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["overlapping, vision tp2", pytest.param(PIPELINED[1], marks=pytest.mark.soak)])
def test_stopping_or_evaluating_in_between_changes_no_bit(layout: str, tmp_path: Path, pool: Pool) -> None:
    """A checkpoint holds nothing of the next step: its rows are made again; an evaluation leaves them alone."""
    settings = seamed(layout, factor=2)
    settings["run"] |= {"steps": 6, "directory": str(tmp_path)}
    straight = check_going_on(pool, settings, settings, exactly=True)
    check_trajectory(pool.run(world_of(settings), run_and_evaluate, settings), straight, exactly=True)


@pytest.mark.soak
@pytest.mark.parametrize("way", ["without", "elsewhere"])
def test_a_run_goes_on_in_another_layout_or_without(way: str, tmp_path: Path, pool: Pool) -> None:
    """A checkpoint is that of the module as it is named: with the tower ahead or not, wherever it lies."""
    settings = seamed("disjoint, language pp2")
    settings["run"] |= {"steps": 5, "directory": str(tmp_path)}
    other = seamed("overlapping, vision tp2") if way == "elsewhere" else in_its_step(settings)
    other["run"] = {**other["run"], "steps": 5, "directory": str(tmp_path)}
    check_going_on(pool, settings, other, exactly=way == "without")


@pytest.mark.soak
def test_rows_and_seconds_count_for_the_module(pool: Pool) -> None:
    """Metrics know one module, each step as many rows as it uses, and seconds of both sides."""
    settings = seamed("disjoint, lanes 2 to 3", factor=2)
    found = pool.run(5, run_counted, settings)
    assert found == pool.run(5, run_counted, in_its_step(settings))
    assert len({rows["vision"] for rows in found[0]}) == 3
    assert {name for rows in found[0] for name in rows} == {"vision", "language"}


@pytest.mark.soak
@pytest.mark.parametrize(("layout", "step"), [("alone", 1), *(("disjoint, language pp2", step) for step in (2, 3))])
def test_a_picture_that_cannot_be_decoded_ends_the_step_that_needs_it(layout: str, step: int, pool: Pool) -> None:
    """The step before, in which its tower was to see it, is done like any other."""
    settings = seamed(layout)
    found = pool.run(world_of(settings), run_torn, settings, step)
    assert "torn.png: expected a picture, got half of one" in found[0][1]
    fine: list[Found] = pool.recall(world_of(settings), run_steps, settings, 1, 3, "")
    assert found[0][0] == [loss for loss, _, _ in fine[0][0]][: step - 1]


def run_held(rank: int, settings: Table) -> tuple[int, int]:
    """Return the bytes that this rank keeps from the first of three steps to the second, and what was estimated."""
    job = make_job(settings)
    trainer = Trainer(job, rank=rank, device=CPU)
    trainer.train(1)
    kept = {
        rows.untyped_storage().data_ptr(): rows.untyped_storage()
        for rows in trainer._runner._training._made_ahead.values()
    }
    return sum(storage.nbytes() for storage in kept.values()), estimate_memory(job)[rank].ahead


@pytest.mark.parametrize("frozen", [["encoder"], pytest.param(True, marks=pytest.mark.soak)])
def test_rows_made_ahead_are_in_the_estimate(frozen: Any, pool: Pool) -> None:
    """On the ranks of the tower's last stage, for as many microbatches as the plan has there at once; nowhere else."""
    settings = seamed("overlapping, vision tp2")
    settings["modules"]["vision"]["frozen"] = frozen
    settings["data"]["pictures"] = "digits"
    found = pool.run(3, run_held, settings)
    for kept, estimated in found[:2]:
        assert 0.5 * kept < estimated < 3 * kept
    assert found[2] == (0, 0)


@pytest.mark.soak
@pytest.mark.parametrize("ending", ["transient", pytest.param("persistent", marks=pytest.mark.soak)])
@pytest.mark.parametrize("what", ["forward", pytest.param("gradient", marks=pytest.mark.soak)])
def test_a_step_that_is_run_again_has_the_rows_of_its_tower(what: str, ending: str, tmp_path: Path, pool: Pool) -> None:
    """A fault of the tower is found in the step that its rows are for, one of the projector in its own."""
    settings = settings_of("disjoint", "adamw")
    settings["modules"]["vision"] |= {"frozen": ["encoder"], "prefetch": True}
    inject = {"step": STEP, "rank": 1, "module": "vision", "microbatch": 1, "what": what}
    inject |= {"times": 1} if ending == "transient" else {"device": "a/1"}
    rerun: dict[str, Any] = {"mode": "validate", "device": "a", "inject": inject}
    found = run_again(pool, with_rerun(settings, tmp_path, **rerun))
    if ending == "persistent":
        found = run_again(pool, with_rerun(settings, tmp_path, "latest", **rerun | {"device": "b"}))
    check_same(found, run_again(pool, with_rerun(settings, tmp_path / "plain")))
    event = events(tmp_path)[-1]
    assert (event["verdict"], event["module"], event["ranks"]) == (ending, "vision", [1])
    if what == "forward":
        assert (event["what"], event["stage"], event["microbatches"]) == ("forward", 0, [1])
