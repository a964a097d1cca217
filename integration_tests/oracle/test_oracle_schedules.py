"""Every schedule over the oracle table: the same losses, gradients and weights, in whatever order work is done.

This is the whole product, for the soak; `test_oracle_distributed` chooses from it what is run every time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import attrs
import pytest
from cases import Modules, features_of
from oracle import Oracle
from tables import CHUNKED, EVEN_EPS, SCHEDULES, Table, enough_microbatches, scheduled, table, world_of
from test_oracle import CLEAR_SEEDS, EXPERTS, FROZEN, LAYOUTS, SLICED, TIED

GROUPS: Mapping[str, Mapping[str, Modules]] = {
    "plain": LAYOUTS,
    "sliced": SLICED,
    "experts": EXPERTS,
    "tied": TIED,
    "frozen": FROZEN,
}
LAYERS = 3
"""Of the table's language model; schedules may need more, for all their stages."""
LANGUAGES: Mapping[str, dict[str, Any]] = {"tied": {"tied": True}, "experts": CLEAR_SEEDS["softmax"][0]}


@attrs.frozen(kw_only=True)
class Case:
    """A layout of the table, and what is chosen beside it."""

    group: str
    layout: str
    schedule: str
    factor: int
    recompute: str
    microbatches: int

    @property
    def modules(self) -> Modules:
        """The modules as the table has them."""
        return GROUPS[self.group][self.layout]

    def __str__(self) -> str:
        """Return what the test is called."""
        return (
            f"{self.group}: {self.layout}, {self.schedule}, passes of {self.factor}, recompute {self.recompute}, "
            f"{self.microbatches} microbatches"
        )

    @property
    def features(self) -> frozenset[str]:
        """What can be told of it, for pairs to be made of; of a single microbatch no schedule shows anything."""
        chosen = {f"passes of {self.factor}", f"recompute {self.recompute}"}
        chosen |= {"several microbatches", self.schedule} if self.microbatches > 1 else {"one microbatch"}
        return frozenset({self.group, *chosen, *features_of(self.modules)})

    @property
    def cost(self) -> int:
        """How much there is to do on all ranks: a beginning that takes as long as four microbatches, and those."""
        return (4 + self.microbatches) * world_of({"modules": self.modules})

    @property
    def settings(self) -> Table:
        """The settings of the run."""
        modules = passing(self.modules, self.factor)
        for keys in modules.values():
            if keys.get("frozen") is not True:
                keys["recompute"] = self.recompute
        settings = table(modules, microbatches=self.microbatches, language=LANGUAGES.get(self.group))
        found = scheduled(settings, self.schedule)
        if found["modules"]["language"]["config"]["layers"] > LAYERS:  # then single elements step by rounding noise
            found["optimizer"]["eps"] = EVEN_EPS
        return found


def passing(modules: Modules, factor: int) -> dict[str, dict[str, Any]]:
    """Return modules with passes over ``factor`` microbatches, those of a second encoder over others."""
    factors = {"language": 1, "glyph": {1: 1, 2: 3, 3: 2}[factor]}
    return {name: {**keys, "batch_factor": factors.get(name, factor)} for name, keys in modules.items()}


def every_case() -> Iterator[Case]:
    """Yield the whole product, without what a layout cannot have: chunks or a warm-up of a pipeline that it lacks.

    Nor passes over more microbatches than there are, which are what smaller ones are.
    """
    layouts = [(group, layout) for group, found in GROUPS.items() for layout in found]
    for (group, layout), schedule, factor, recompute, microbatches in product(
        layouts, SCHEDULES, (1, 2, 3), ("none", "selective", "full"), (1, 2, 4)
    ):
        modules = passing(GROUPS[group][layout], factor)
        if modules["language"].get("pp", 1) == 1 and (schedule in CHUNKED or schedule == "zb-h2"):
            continue
        try:
            count = enough_microbatches(modules, schedule, microbatches)
        except LookupError:
            continue
        if factor <= count:
            chosen = {"schedule": schedule, "factor": factor, "recompute": recompute, "microbatches": count}
            yield Case(group=group, layout=layout, **chosen)


EVERY = list(dict.fromkeys(every_case()))
TABLE = list(
    {
        (case.group, case.layout): case
        for case in EVERY
        if (case.schedule, case.factor, case.recompute) == ("1f1b", 1, "none")
    }.values()
)
"""The table itself, with as many microbatches as there are above."""


@pytest.mark.soak
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_no_schedule_changes_the_result(case: Case, oracle: Oracle) -> None:
    """Loss, gradients and weights equal one process."""
    assert oracle.check(oracle.clear(case.settings)) == ""
