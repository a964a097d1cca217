"""Moments of AdamW in bf16: updates near those in fp32 in any layout, and runs that resume with the same bits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Modules, in_turn
from oracle import MOMENTS
from resuming import assemble, check_going_on, run_and_save, run_steps
from tables import RATE, STEPS, Table, alone, table, world_of
from test_oracle import SP, on

from mimo.checkpoint import read_manifest
from mimo.testing import Pool
from mimo.trainer.runtime import step_folder

LOSSES = 1e-4
LAYOUTS: dict[str, Modules] = {
    "alone": {"vision": on(0, 0), "language": on(0, 0)},
    "lanes 2 to 3": {"vision": on(0, 1), "language": on(2, 4)},
    "tp2 sp pp2 dp2": {"vision": on(0, 1, tp=2, **SP), "language": on(0, 7, tp=2, pp=2, **SP)},
    "cp2 dp2, vision pp2": {"vision": on(0, 1, pp=2), "language": on(2, 5, cp=2)},
}
PLUGINS: dict[str, dict[str, Any]] = {
    "adamw": {"plugin": "adamw"},
    "optimizer": {"plugin": "distributed", "shard": "optimizer"},
    "full": {"plugin": "distributed", "shard": "full"},
}


def in_bf16(modules: Modules, plugin: str, **more: Any) -> Table:
    """Return settings of a layout whose moments lie in bf16."""
    settings = table(modules, microbatches=2, **more)
    settings["optimizer"] |= {**PLUGINS[plugin], "moments": "bf16"}
    return settings


@pytest.mark.parametrize(("layout", "plugin"), in_turn(LAYOUTS, list(PLUGINS)))
def test_weights_move_as_with_moments_in_fp32(layout: str, plugin: str, pool: Pool) -> None:
    """The first gradients are the same; after some steps weights are near those of one process."""
    settings = table(LAYOUTS[layout], microbatches=2)
    truth = pool.recall(1, run_steps, alone(settings), 1, STEPS, "")
    found = pool.run(world_of(settings), run_steps, in_bf16(LAYOUTS[layout], plugin), 1, STEPS, "")
    (expected, _), *_ = truth
    for steps, _ in found:
        assert math.isclose(steps[0][0], expected[0][0], rel_tol=1e-5)
        assert math.isclose(steps[0][1], expected[0][1], rel_tol=1e-5)
        assert all(math.isclose(mine[0], other[0], rel_tol=LOSSES) for mine, other in zip(steps, expected, strict=True))
    weights = assemble(truth)
    farthest = {
        name: float((value - weights[name]).norm()) / (RATE * STEPS * math.sqrt(value.numel()))
        for name, value in assemble(found).items()
        if not name.startswith("optimizer.")
    }
    assert max(farthest.values()) < MOMENTS, farthest
    assert max(farthest.values()) > 0, "nothing was rounded"


@pytest.mark.parametrize(("layout", "plugin"), [("lanes 2 to 3", "full"), ("tp2 sp pp2 dp2", "adamw")])
def test_a_run_resumes_with_the_same_bits(layout: str, plugin: str, pool: Pool, tmp_path: Path) -> None:
    """Moments are saved in bf16, and read as such."""
    settings = in_bf16(LAYOUTS[layout], plugin)
    settings["run"] |= {"directory": str(tmp_path), "steps": 6}
    check_going_on(pool, settings, settings, exactly=True)
    tensors = read_manifest(step_folder(tmp_path)).tensors
    kinds = {name: entry.dtype for name, entry in tensors.items() if name.endswith(("exp_avg", "exp_avg_sq"))}
    assert set(kinds.values()) == {"BF16"}, kinds


@pytest.mark.soak
def test_a_run_resumes_with_moments_in_another_dtype(pool: Pool, tmp_path: Path) -> None:
    """What was saved in fp32 is rounded when it is read, and what was saved in bf16 is put into fp32."""
    exact = table(LAYOUTS["lanes 2 to 3"], microbatches=2)
    rounded = in_bf16(LAYOUTS["lanes 2 to 3"], "adamw")
    for number, (first, second) in enumerate([(exact, rounded), (rounded, exact)]):
        run = {"directory": str(tmp_path / str(number)), "steps": 4}
        saved = {**first, "run": {**first["run"], **run}}
        pool.run(world_of(saved), run_and_save, saved)
        again = {**second, "run": {**second["run"], **run}}
        losses = [steps[-1][0] for steps, _ in pool.run(world_of(again), run_steps, again, 4, 4, run["directory"])]
        straight = [steps[-1][0] for steps, _ in pool.run(world_of(saved), run_steps, saved, 1, 4, "")]
        assert all(math.isclose(one, other, rel_tol=LOSSES) for one, other in zip(losses, straight, strict=True))
        assert torch.isfinite(torch.tensor(losses)).all()
