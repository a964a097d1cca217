"""Ranks whose plans differ end with an error before anything is sent, instead of waiting for each other."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from unittest.mock import patch

import attrs
import pytest
from jobs import CPU, make_job
from tables import Table, table
from test_oracle import on

from mimo.hooks import PlanError
from mimo.testing import Pool
from mimo.trainer import Trainer


def run_with_other_plan(rank: int, settings: Table, which: str) -> str:
    """Return the error of this rank where the last one has made another plan."""
    job = make_job(settings)
    if rank == 2:
        other = make_job({**settings, "schedule": {"plugin": "gpipe"}})
        job = attrs.evolve(job, **{which: getattr(other, which)})
        if which == "evaluation_plan":  # orders of forwards alone may be the same
            job = attrs.evolve(job, evaluation_plan=attrs.evolve(job.evaluation_plan, schedule="other"))
    with pytest.raises(PlanError) as refused:
        Trainer(job, rank=rank, device=CPU)
    return str(refused.value)


def run_with_other_costs(rank: int, settings: Table) -> str:
    """Return the error of this rank where the last one has another profile, by which samples are placed."""
    job = make_job(settings)
    costs = type(sys.modules[Trainer.__module__].sample_costs(job))
    scales = patch.object(costs, "scales_text", "of another profile")
    with scales if rank == 2 else nullcontext(), pytest.raises(PlanError) as refused:
        Trainer(job, rank=rank, device=CPU)
    return str(refused.value)


def test_other_profiles_are_found_before_the_first_step(pool: Pool) -> None:
    """Where samples are placed by cost, ranks with one plan could send different rows."""
    settings = table({"vision": on(0, 0), "language": on(1, 2, pp=2)}, microbatches=4)
    settings["data"]["balance"] = "cost"
    refused = pool.run(3, run_with_other_costs, settings)
    assert len(set(refused)) == 1
    assert "got one on rank 0, and another on rank 2. Give their machines the same data" in refused[0]
    assert "schedule.profile" in refused[0]


@pytest.mark.each("which")
@pytest.mark.parametrize("which", ["plans", "evaluation_plan"])
def test_other_plans_are_found_before_the_first_step(which: str, pool: Pool) -> None:
    """Every rank names the same two ranks, and what may have been different."""
    settings = table({"vision": on(0, 0), "language": on(1, 2, pp=2)}, microbatches=4)
    refused = pool.run(3, run_with_other_plan, settings, which)
    assert len(set(refused)) == 1
    assert "schedule: expected the same plan on all ranks, got one on rank 0, and another on rank 2" in refused[0]
    assert "schedule.profile" in refused[0]
