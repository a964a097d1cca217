"""Samples and items placed by cost and by count, on ragged samples, beside the truth."""

from __future__ import annotations

import pytest
from cases import Modules, in_turn
from jobs import make_job
from oracle import Oracle
from tables import SAMPLES, Table, table
from test_oracle import SP, on

from mimo.trainer.runtime import SampleCosts, StepData

MICROBATCHES = 4
LAYOUTS: dict[str, Modules] = {
    "colocated, lanes 4": {"vision": on(0, 3), "language": on(0, 3)},
    "disjoint, lanes 4 to 3": {"vision": on(0, 3), "language": on(4, 6)},
    "two encoders, lanes 3 and 2 to 2 sp": {"vision": on(0, 2), "glyph": on(3, 4), "language": on(4, 7, tp=2, **SP)},
    "colocated, vision dp4, language cp2 dp2": {"vision": on(0, 3), "language": on(0, 3, cp=2)},
    "passes over 2, vision cp2 dp2, language pp2 dp2": {
        "vision": {**on(0, 3, cp=2), "batch_factor": 2},
        "language": on(2, 5, pp=2),
    },
    "passes over 3, vision sp dp2, overlapping": {
        "vision": {**on(0, 3, tp=2, **SP), "batch_factor": 3},
        "language": on(2, 5, tp=2),
    },
}


def settings_of(layout: str, balance: str, pictures: str = "many") -> Table:
    """Return the settings of a layout."""
    microbatches = 2 if "lanes 4 to 3" in layout else 3 if "colocated, lanes 4" in layout else MICROBATCHES
    settings = table(LAYOUTS[layout], microbatches=microbatches, pictures=pictures)
    settings["data"]["balance"] = balance
    return settings


@pytest.mark.parametrize(("layout", "balance"), in_turn(LAYOUTS, ["cost", "count"]))
def test_where_samples_and_items_lie_changes_nothing(layout: str, balance: str, oracle: Oracle) -> None:
    """Loss, gradients and weights are those of a plain loop, however a step is placed."""
    assert oracle.check(settings_of(layout, balance)) == ""


@pytest.mark.parametrize("layout", ["passes over 2, vision cp2 dp2, language pp2 dp2", "disjoint, lanes 4 to 3"])
@pytest.mark.parametrize("pictures", ["first", "none"])
def test_lanes_and_microbatches_without_items_are_placed_too(layout: str, pictures: str, oracle: Oracle) -> None:
    """Where few samples or none have any."""
    assert oracle.check(settings_of(layout, "cost", pictures)) == ""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ragged_samples_are_placed_anywhere(layout: str) -> None:
    """These cases have samples out of order, and items on other lanes than by count; by cost, all of a step's."""
    job = make_job(settings_of(layout, "cost"))
    assert job.train is not None
    assert job.balance == "cost"
    samples = range(SAMPLES)
    even, placed = (
        StepData.of_step(job, job.train, lambda: samples, costs=costs) for costs in (None, SampleCosts(job))
    )
    order = [layout.sample for one in placed.microbatches for layout in one.layouts]
    assert sorted(order) == list(samples) != order
    assert [one.sample for one in placed.layouts] == list(samples)
    for module in job.encoders:
        lanes = [
            {
                (item.info.sample, item.info.index): lane
                for one in data.microbatches
                for lane in range(module.grid.dp)
                for item in one.items(module, lane)
            }
            for data in (even, placed)
        ]
        assert lanes[0].keys() == lanes[1].keys()
        assert lanes[0] != lanes[1]
