"""The oracle over a generator that is itself split: its layers over stages, its rows over slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from jobs import CPU, make_job
from oracle import Oracle
from resuming import check_going_on
from tables import Table, alone, scheduled, table, world_of

from mimo.testing import Pool
from mimo.trainer import Trainer

FLOW: Mapping[str, Any] = {
    "height": 4,
    "width": 6,
    "channels": 1,
    "patch": 2,
    "hidden": 24,
    "layers": 4,
    "heads": 2,
    "intermediate": 40,
    "drop_condition": 0.2,
}
ROLES: Mapping[str, Sequence[str]] = {"image": ("input", "output", "both")}


def on(first: int, last: int, **keys: Any) -> dict[str, Any]:
    """Return a grid on ranks ``first`` to ``last``, and other keys of its module."""
    return {"ranks": list(range(first, last + 1)), **keys}


def drawing(
    language: Mapping[str, Any], drawer: Mapping[str, Any], *, microbatches: int = 2, **more: Mapping[str, Any]
) -> Table:
    """Return settings of a model that sees and draws, whose modules lie so; ``vision`` on the first rank."""
    modules: dict[str, Mapping[str, Any]] = {"vision": on(0, 0), **more, "language": language}
    modules["drawer"] = {"plugin": "flow", "fed_by": "language", "config": FLOW, "loss_weight": 0.7, **drawer}
    return table(modules, microbatches=microbatches, weights="mixed", roles=ROLES)


STAGES: dict[str, Table] = {
    "pp2": drawing(on(0, 0), on(0, 1, pp=2)),
    "pp2 lanes": drawing(on(0, 1, tp=2), on(0, 3, pp=2, recompute="full", batch_factor=2)),
    "pp2 tp2": drawing(on(0, 1, pp=2), on(1, 4, pp=2, tp=2), microbatches=4),
    "pp3": drawing(on(0, 1), on(0, 2, pp=3, frozen=["connector"])),
    "pp2 chunks2": drawing(on(2, 2), on(0, 1, pp=2, chunks=2), microbatches=4),
}


@pytest.mark.parametrize("layout", STAGES)
def test_stages_never_change_what_is_drawn(layout: str, oracle: Oracle) -> None:
    """Loss, gradients and weights equal one process; what is made without its rows is so on each stage."""
    assert oracle.check(STAGES[layout]) == ""


SP: Mapping[str, Any] = {"sequence_parallel": True}
SLICES: dict[str, Table] = {
    "cp2": drawing(on(0, 0), on(0, 1, cp=2)),
    "cp3": drawing(on(0, 1, cp=2), on(0, 2, cp=3, batch_factor=2), microbatches=4),
    "tp2 sp": drawing(on(0, 1, tp=2, **SP), on(0, 1, tp=2, recompute="full", **SP)),
    "cp2 tp2 sp": drawing(on(1, 2, pp=2), on(0, 3, cp=2, tp=2, batch_factor=3, **SP), microbatches=4),
    "cp2 tp2": drawing(on(0, 1), on(0, 3, cp=2, tp=2)),
    "pp2 cp2": drawing(on(0, 0), on(0, 3, pp=2, cp=2), microbatches=4),
    "pp2 lanes tp2 sp": drawing(on(0, 1), on(0, 7, pp=2, tp=2, **SP)),
}


@pytest.mark.parametrize("layout", SLICES)
def test_slices_never_change_what_is_drawn(layout: str, oracle: Oracle) -> None:
    """Rows, the sequence, and losses are cut over ranks wherever a slice ends, padding counts for nothing."""
    assert oracle.check(SLICES[layout]) == ""


@pytest.mark.soak
def test_slices_leave_out_broken_items(oracle: Oracle) -> None:
    """Whatever of their losses a rank has."""
    settings = drawing(on(0, 0), on(0, 3, pp=2, cp=2, batch_factor=2))
    settings["data"] |= {"damaged": [2, 3, 5, 7, 11, 13], "max_broken": 1.0}
    assert oracle.check(settings) == ""


@pytest.mark.soak
@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1", "zb-v", "ahead"])
def test_schedules_draw_in_stages(schedule: str, oracle: Oracle) -> None:
    """Both modules in stages that share ranks, of some schedules in chunks."""
    chunks = 2 if schedule in ("interleaved", "zb-v") else 1
    settings = drawing(on(0, 1, pp=2), on(0, 1, pp=2, chunks=chunks), microbatches=4)
    assert oracle.check(scheduled(settings, schedule)) == ""


def test_a_stage_that_nothing_learns_through_drops_as_others_do(oracle: Oracle) -> None:
    """What it does without follows from training, not from whether it has gradients: here its first stage has none."""
    settings = drawing(on(0, 0, frozen=True), on(0, 1, pp=2, frozen=["connector", "patch*", "time*", "layers.[01].*"]))
    settings["modules"]["vision"]["frozen"] = True
    assert oracle.check(settings) == ""


def _reported(rank: int, settings: Table) -> tuple[float, float, int]:
    """Return the loss of a generator that a step reports, and an evaluation before it, and its rows."""
    trainer = Trainer(make_job(settings), rank=rank, device=CPU)
    held_out = trainer.evaluate(0)
    assert held_out is not None
    step = trainer.train(1)
    return step.losses["drawer.loss"], held_out.losses["drawer.loss"], step.rows["drawer"]


def test_losses_of_slices_count_once(pool: Pool) -> None:
    """In what steps and evaluations report, on whatever ranks they are."""
    settings = drawing(on(0, 0), on(0, 7, pp=2, cp=2, tp=2, **SP))
    ((step, held_out, rows),) = pool.run(1, _reported, alone(settings))
    for found in pool.run(world_of(settings), _reported, settings):
        assert found == (pytest.approx(step, rel=1e-5), pytest.approx(held_out, rel=1e-5), rows)


@pytest.mark.soak
def test_a_run_resumes_with_its_generator_on_other_stages(pool: Pool, tmp_path: Path) -> None:
    """From two stages to lanes."""
    first, second = drawing(on(0, 0), on(0, 1, pp=2)), drawing(on(0, 0), on(0, 1))
    for settings in (first, second):
        settings["run"] |= {"steps": 5, "directory": str(tmp_path)}
    check_going_on(pool, first, second, exactly=False)
