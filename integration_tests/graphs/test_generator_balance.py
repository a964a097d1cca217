"""What generators make placed by cost and by count, on samples with many items to make or none, beside the truth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from cases import Modules
from jobs import make_job
from oracle import Oracle
from tables import SAMPLES, Table, by_tokens, table
from test_generators import FLOW, OWN, ROLES, SP, drawer, on

from mimo.trainer.runtime import SampleCosts, StepData, StepSizes, balance_of

MAKES: Mapping[str, Any] = {"plugin": "flow", "config": {**FLOW, "intermediate": 40}}
LAYOUTS: dict[str, Modules] = {
    "lanes 3 to 2": {"vision": on(0, 1), "language": on(0, 2), "drawer": drawer(1, 2, **MAKES)},
    "lanes 2 to 3, own rows": {"vision": on(0, 0), "language": on(0, 1), "drawer": drawer(2, 4, **OWN)},
    "tp2 sp to lanes 2 tp2": {
        "vision": on(0, 1),
        "language": on(0, 3, tp=2, **SP),
        "drawer": drawer(2, 5, tp=2, **MAKES),
    },
    "pp2 to passes over 2": {
        "vision": on(0, 1),
        "language": on(0, 3, pp=2),
        "drawer": drawer(3, 5, batch_factor=2, **MAKES),
    },
    "cp2 and two generators": {
        "glyph": on(0, 1),
        "vision": on(0, 0),
        "language": on(0, 3, cp=2),
        "drawer": drawer(1, 2),
        "scribe": drawer(2, 4, batch_factor=2, **OWN),
    },
}


def settings_of(layout: str, balance: str = "cost", pictures: str = "many") -> Table:
    """Return the settings of a layout: samples of up to five pictures, to read or to make."""
    roles = {**ROLES, **({"glyph": ("output", "both")} if "glyph" in LAYOUTS[layout] else {})}
    microbatches = 4 if "passes" in layout or "two" in layout else 2
    settings = table(LAYOUTS[layout], microbatches=microbatches, pictures=pictures, weights="mixed", roles=roles)
    settings["data"]["balance"] = balance
    return settings


@pytest.mark.parametrize("layout", LAYOUTS)
def test_where_items_are_made_changes_nothing(layout: str, oracle: Oracle) -> None:
    """Loss, gradients and weights are those of a plain loop."""
    assert oracle.check(settings_of(layout)) == ""


@pytest.mark.soak
@pytest.mark.parametrize("changes", [{"balance": "count"}, {"pictures": "first"}, {"pictures": "none"}])
def test_few_items_to_make_are_placed_too(changes: Mapping[str, str], oracle: Oracle) -> None:
    """Where one sample has all of them, or none has any; by count as well."""
    assert oracle.check(settings_of("pp2 to passes over 2", **changes)) == ""


def test_items_of_ragged_microbatches_are_placed(oracle: Oracle) -> None:
    """Where microbatches are filled with tokens."""
    settings = by_tokens(settings_of("lanes 3 to 2"), batch_tokens=130, micro_tokens=45)
    assert oracle.check(settings) == ""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lanes_that_make_items_have_about_the_same_to_do(layout: str) -> None:
    """Of a sample the same lane makes all; which one differs from what it is by count, and lanes are more even."""
    job = make_job(settings_of(layout))
    assert job.train is not None
    assert job.balance == "cost"
    costs, samples = SampleCosts(job), range(SAMPLES)
    even, placed = (StepData.of_step(job, job.train, lambda: samples, costs=how) for how in (None, costs))
    found = balance_of(job, StepSizes.of(job, job.train, samples), costs)
    for module in job.generators:
        lanes: list[dict[int, int]] = [{}, {}]
        for own, data in zip(lanes, (even, placed), strict=True):
            for one in data.microbatches:
                for lane in range(module.grid.dp):
                    for item in one.items(module, lane):
                        assert own.setdefault(item.info.sample, lane) == lane
        assert lanes[0].keys() == lanes[1].keys()
        assert lanes[0] != lanes[1]
        by_count, by_cost = (sum(found[how].loads(module.name)) for how in ("count", "cost"))
        assert len(placed.microbatches) <= by_cost < by_count
