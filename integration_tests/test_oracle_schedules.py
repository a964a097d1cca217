"""Every schedule on every layout of the oracle table that it can run: the same losses, gradients and weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import cycle
from typing import Any

import pytest
from oracle import CHUNKED, SCHEDULES, Oracle, Table, scheduled, table
from pool import Pool
from test_oracle import CLEAR_SEEDS, EXPERTS, FROZEN, LAYOUTS, SLICED, TIED

Modules = Mapping[str, Mapping[str, Any]]
GROUPS: Mapping[str, Mapping[str, Modules]] = {
    "layout": LAYOUTS,
    "sliced": SLICED,
    "experts": EXPERTS,
    "tied": TIED,
    "frozen": FROZEN,
}
LANGUAGES: Mapping[str, dict[str, Any]] = {"tied": {"tied": True}, "experts": CLEAR_SEEDS["softmax"][0]}


@pytest.fixture(scope="module")
def oracle(pool: Pool) -> Oracle:
    """The oracle of all cases here."""
    return Oracle(pool)


def cases() -> Iterator[Any]:
    """Yield every layout with every schedule that it can run but ``1f1b`` as `test_oracle` has it.

    Passes, recomputation and the number of microbatches go round beside them, so that with each schedule all are seen.
    """
    factors, recomputes, counts = cycle((1, 2, 3)), cycle(("none", "full", "selective", "none")), cycle((4, 2))
    for group, layouts in GROUPS.items():
        for layout, modules in layouts.items():
            pipelined = modules["language"].get("pp", 1) > 1
            for schedule in SCHEDULES:
                if (schedule in CHUNKED and not pipelined) or (schedule == "zb-h2" and not pipelined):
                    continue
                how = next(factors), next(recomputes), next(counts)
                yield pytest.param(group, layout, schedule, *how, id=f"{group}: {layout}, {schedule}")


def settings_of(group: str, layout: str, schedule: str, factor: int, recompute: str, microbatches: int) -> Table:
    """Return the settings of a case."""
    modules = {name: dict(keys) for name, keys in GROUPS[group][layout].items()}
    for name, keys in modules.items():
        if keys.get("frozen") is not True:
            keys["recompute"] = recompute
        if name != "language":
            keys["batch_factor"] = factor
    lanes = modules["language"].get("dp", 1)
    count = microbatches if 24 % (lanes * microbatches) == 0 else 2
    language = LANGUAGES.get(group)
    return scheduled(table(modules, microbatches=count, language=language), schedule)


@pytest.mark.parametrize(("group", "layout", "schedule", "factor", "recompute", "microbatches"), list(cases()))
def test_no_schedule_changes_the_result(
    group: str, layout: str, schedule: str, factor: int, recompute: str, microbatches: int, oracle: Oracle
) -> None:
    """Loss, gradients and weights equal one process, in whatever order the plan has the same work done."""
    settings = oracle.clear(settings_of(group, layout, schedule, factor, recompute, microbatches))
    assert "\n".join(oracle.check(settings)) == ""
