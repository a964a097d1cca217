"""Reading beside the step changes no result, in any layout and with any number of threads."""

from __future__ import annotations

from typing import Any

import pytest
from cases import in_turn
from jobs import CPU, make_job
from oracle import Oracle
from tables import Table, table, world_of
from test_oracle import SP, Modules, on

from mimo.testing import Pool
from mimo.trainer import Trainer

LAYOUTS: dict[str, Modules] = {
    "disjoint, lanes 2 to 3": {"vision": on(0, 1), "language": on(2, 4)},
    "two encoders, colocated, tp2 and cp2": {
        "vision": on(0, 1, tp=2, **SP),
        "glyph": on(0, 1, cp=2),
        "language": on(0, 1, tp=2),
    },
    "vision cp2 pp2 a step ahead": {
        "vision": on(0, 3, cp=2, pp=2, frozen=True, prefetch=True, batch_factor=2),
        "language": on(3, 4, pp=2),
    },
}
LOADING: dict[str, dict[str, Any]] = {
    "by the step": {"workers": 0},
    "by two threads, three steps ahead, each item once": {"workers": 2, "ahead": 3, "hand_on": 0},
    "by the step, some microbatches by one rank": {"workers": 0, "hand_on": 250},
    "by two threads that may hold next to nothing": {"workers": 2, "ahead": 1, "ahead_bytes": 64},
}


def loaded(layout: str, how: str) -> Table:
    """Return settings of a layout with four microbatches."""
    settings = table(LAYOUTS[layout], microbatches=4)
    settings["data"] |= LOADING[how]
    return settings


@pytest.mark.parametrize(("layout", "how"), in_turn(LAYOUTS, [*LOADING]))
def test_loading_beside_the_step_changes_nothing(layout: str, how: str, oracle: Oracle) -> None:
    """Loss, gradients and weights after three steps equal one process that reads by a plain loop."""
    assert oracle.check(loaded(layout, how)) == ""


def run_waiting(rank: int, settings: Table) -> list[float]:
    """Return the seconds that steps have waited for data, as this rank is told."""
    trainer = Trainer(make_job(settings), rank=rank, device=CPU)
    return [trainer.train(step).data_seconds for step in (1, 2)]


def test_all_ranks_know_how_long_the_slowest_has_waited_for_data(pool: Pool) -> None:
    """Also the ranks of the language model, which decode nothing."""
    settings = loaded("disjoint, lanes 2 to 3", "by the step")
    first, *others = pool.run(world_of(settings), run_waiting, settings)
    assert all(seconds > 0 for seconds in first)
    assert others == [first] * len(others)
