"""Every schedule over the oracle table: the same losses, gradients and weights, in whatever order work is done.

Run are as many cases as show each feature of a layout, each schedule, pass size and recomputation beside each of the
others; ``nox -s soak`` runs all.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from itertools import product
from typing import Any

import attrs
import pytest
from oracle import CHUNKED, SCHEDULES, Oracle, Table, scheduled, table
from pool import Pool
from test_oracle import CLEAR_SEEDS, EXPERTS, FROZEN, LAYOUTS, SLICED, TIED

Modules = Mapping[str, Mapping[str, Any]]
GROUPS: Mapping[str, Mapping[str, Modules]] = {
    "plain": LAYOUTS,
    "sliced": SLICED,
    "experts": EXPERTS,
    "tied": TIED,
    "frozen": FROZEN,
}
LANGUAGES: Mapping[str, dict[str, Any]] = {"tied": {"tied": True}, "experts": CLEAR_SEEDS["softmax"][0]}
AXES = ("pp", "dp", "cp", "tp", "ep", "etp", "sequence_parallel")


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

    @property
    def name(self) -> str:
        """What the test is called."""
        return (
            f"{self.group}: {self.layout}, {self.schedule}, passes of {self.factor}, recompute {self.recompute}, "
            f"{self.microbatches} microbatches"
        )

    @property
    def features(self) -> frozenset[str]:
        """What can be told of it, for pairs to be made of."""
        ranks = {name: set(keys["ranks"]) for name, keys in self.modules.items()}
        found = {self.group, f"{len(ranks)} modules", f"passes of {self.factor}", f"recompute {self.recompute}"}
        found |= {self.schedule, f"{self.microbatches} microbatches"}
        for name, keys in self.modules.items():
            found |= {f"{name} {axis}" for axis in AXES if keys.get(axis, 1) not in (1, False)}
        for encoder in ranks.keys() - {"language"}:
            shared = ranks[encoder] & ranks["language"]
            found.add(
                "disjoint" if not shared else "colocated" if len(shared) == len(ranks[encoder]) else "overlapping"
            )
        return frozenset(found)

    @property
    def settings(self) -> Table:
        """The settings of the run."""
        modules = {name: dict(keys) for name, keys in self.modules.items()}
        for name, keys in modules.items():
            if keys.get("frozen") is not True:
                keys["recompute"] = self.recompute
            if name != "language":
                keys["batch_factor"] = self.factor
        lanes = modules["language"].get("dp", 1)
        count = self.microbatches if 24 % (lanes * self.microbatches) == 0 else 2
        return scheduled(table(modules, microbatches=count, language=LANGUAGES.get(self.group)), self.schedule)


def every_case() -> Iterator[Case]:
    """Yield the whole product, without what a layout cannot have: chunks or a warm-up of a pipeline that it lacks."""
    layouts = [(group, layout) for group, found in GROUPS.items() for layout in found]
    for (group, layout), schedule, factor, recompute, microbatches in product(
        layouts, SCHEDULES, (1, 2, 3), ("none", "selective", "full"), (2, 4)
    ):
        case = Case(
            group=group,
            layout=layout,
            schedule=schedule,
            factor=factor,
            recompute=recompute,
            microbatches=microbatches,
        )
        pipelined = case.modules["language"].get("pp", 1) > 1
        if pipelined or not (schedule in CHUNKED or schedule == "zb-h2"):
            yield case


def cover(cases: Sequence[Case]) -> set[Case]:
    """Return cases in which every pair of features occurs that occurs in any, and each layout."""
    order = random.Random(0).sample(cases, len(cases))
    numbers: dict[str, int] = {}
    features = {case: [numbers.setdefault(one, len(numbers)) for one in case.features] for case in order}
    pairs: dict[Case, int] = {}  # a bit for each pair
    for case, found in features.items():
        row = sum(1 << number for number in found)
        pairs[case] = sum(row << number * len(numbers) for number in found)
    missing = reduce(operator.or_, pairs.values())
    chosen = set()
    for least in (40, 20, 10, 4, 1):
        for case in order:
            if (pairs[case] & missing).bit_count() >= least:
                missing &= ~pairs[case]
                chosen.add(case)
    seen = {(case.group, case.layout) for case in chosen}
    for case in order:
        if (case.group, case.layout) not in seen:
            seen.add((case.group, case.layout))
            chosen.add(case)
    return chosen


EVERY = list(every_case())
COVER = cover(EVERY)


@pytest.fixture(scope="module")
def oracle(pool: Pool) -> Oracle:
    """The oracle of all cases here."""
    return Oracle(pool)


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[] if case in COVER else [pytest.mark.soak]) for case in EVERY]
)
def test_no_schedule_changes_the_result(case: Case, oracle: Oracle) -> None:
    """Loss, gradients and weights equal one process."""
    assert "\n".join(oracle.check(oracle.clear(case.settings))) == ""
