"""The oracle table, and where state, gradients or parameters are spread over data lanes, over all of them or over some.

Run are as many cases as show each layout, and each feature of one, each schedule, pass size, recomputation and way of
spreading beside each of the others; ``nox -s soak`` runs more.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle, product
from typing import Any, NamedTuple

import pytest
from cases import Modules, cover, covering, in_turn
from oracle import Oracle
from tables import Table, scheduled, table
from test_oracle import CLEAR_SEEDS, EMPTY, on
from test_oracle_schedules import EVERY, TABLE, Case


class Way(NamedTuple):
    """What is spread, over how many lanes, 0 for all, and whether sums overlap with the backward."""

    shard: str
    among: int = 0
    overlaps: bool = True

    @property
    def features(self) -> set[str]:
        """What can be told of it; see `cases.cover`."""
        return {f"spread {self.shard}", f"over {self.among}", f"overlaps {self.overlaps}"}


SPREADS = (("optimizer", 0), ("full", 2), ("gradients", 0), ("optimizer", 2), ("full", 0), ("gradients", 2))
WAYS = [
    Way(shard, among, overlaps=number % 2 == half) for half in (0, 1) for number, (shard, among) in enumerate(SPREADS)
]


def lanes(keys: Mapping[str, Any]) -> int:
    """Return the data lanes of a module."""
    return int(keys["dp"]) * int(keys.get("cp", 1))


def spreads(modules: Modules) -> bool:
    """Tell whether anything can be spread."""
    return any(lanes(keys) > 1 for keys in modules.values())


def distributed(settings: Table, way: Way) -> Table:
    """Return settings with the plugin."""
    modules = {
        name: {**keys, "optimizer": {"shard_lanes": way.among if way.among and lanes(keys) % way.among == 0 else 0}}
        for name, keys in settings["modules"].items()
    }
    return {
        **settings,
        "modules": modules,
        "optimizer": {
            **settings["optimizer"],
            "plugin": "distributed",
            "shard": way.shard,
            "overlap_grad_reduce": way.overlaps,
            "overlap_param_gather": way.overlaps,
        },
    }


def features(case: Case, way: Way | None) -> set[str]:
    """Return what can be told of both."""
    if way is None:
        return {*case.features, "not spread"}
    odd = {f"{name} odd lanes" for name, keys in case.modules.items() if lanes(keys) > 1 and lanes(keys) % 2}
    return {*case.features, *way.features, *odd}


WEIGHTS = ("none", "mixed")
MIXED: dict[tuple[Case, Way | None, str], set[str]] = {
    (case, way, weights): {f"weights {weights}", *features(case, way)}
    for number, case in enumerate(EVERY)
    for way in [[None, *WAYS][number % (1 + len(WAYS))] if spreads(case.modules) else None]
    for weights in [WEIGHTS[number // (1 + len(WAYS)) % 2]]
}
"""The table with every schedule, pass size and recomputation, each in one way, with or without weights of tokens."""
SPREAD = {(case, way): features(case, way) for case in TABLE if spreads(case.modules) for way in WAYS}
"""The table in every way."""
CHOSEN = cover(MIXED, cost=lambda mixed: mixed[0].cost, once=lambda mixed: {f"{mixed[0].group}: {mixed[0].layout}"})


def settings_of(case: Case, way: Way | None, weights: str, oracle: Oracle) -> Table:
    """Return the settings of one of the table, with a seed that is clear."""
    settings = case.settings
    settings["data"]["weights"] = weights
    settings = oracle.clear(settings)
    return settings if way is None else distributed(settings, way)


@pytest.mark.parametrize(("case", "way", "weights"), [mixed for mixed in MIXED if mixed in CHOSEN], ids=str)
def test_no_choice_beside_a_layout_changes_the_result(
    case: Case, way: Way | None, weights: str, oracle: Oracle
) -> None:
    """Loss, gradients and weights equal one process that steps plain AdamW, in every layout and schedule."""
    assert oracle.check(settings_of(case, way, weights, oracle)) == ""


@pytest.mark.soak
@pytest.mark.parametrize(("case", "way"), SPREAD, ids=str)
def test_spreading_changes_nothing(case: Case, way: Way, oracle: Oracle) -> None:
    """Every layout of the table in every way."""
    assert oracle.check(distributed(oracle.clear(case.settings), way)) == ""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("case", "way"),
    covering(
        {(case, way): {"biases", *found} for (case, way), found in SPREAD.items() if case.group == "experts"},
        shown=SPREAD.values(),
    ),
)
def test_biases_of_experts_follow_their_lanes(case: Case, way: Way, oracle: Oracle) -> None:
    """No gradient trains them; and experts have fewer lanes than what stands beside them, or none."""
    language, seed = CLEAR_SEEDS["sigmoid"]
    settings = table(case.modules, microbatches=2, language=language, seed=seed)
    assert oracle.check(distributed(oracle.clear(settings), way)) == ""


@pytest.mark.parametrize(
    ("layout", "step"), in_turn(EMPTY, [*zip(WAYS, cycle(product(["first", "none"], [4, 1])), strict=False)])
)
def test_lanes_without_pictures_take_part(layout: str, step: tuple[Way, tuple[str, int]], oracle: Oracle) -> None:
    """No lane waits in vain for one that has nothing to compute, in the last microbatch or in any."""
    way, (pictures, microbatches) = step
    settings = table(EMPTY[layout], microbatches=microbatches, pictures=pictures)
    assert oracle.check(distributed(settings, way)) == ""


@pytest.mark.soak
@pytest.mark.parametrize("shard", ["optimizer", "gradients", "full"])
def test_what_two_stages_of_a_rank_share_is_spread_once(shard: str, oracle: Oracle) -> None:
    """Chunks in a V put the first and the last stage, and so the tied embedding, on the same ranks."""
    modules = {"vision": on(0, 1), "language": on(0, 3, pp=2)}
    settings = scheduled(table(modules, microbatches=2, language={"tied": True}), "zb-v")
    assert oracle.check(distributed(settings, Way(shard))) == ""


SHY: dict[str, Modules] = {
    "two lanes": {"vision": on(0, 1, plugin="shy-vit"), "language": on(0, 1)},
    "three lanes": {"vision": on(0, 2, plugin="shy-vit"), "language": on(3, 4)},
    "a projector alone": {"vision": on(0, 2, plugin="shy-vit", frozen=["encoder"]), "language": on(2, 3)},
}


@pytest.mark.parametrize(
    ("layout", "step"),
    in_turn(
        SHY,
        [*product([Way("full"), Way("gradients", overlaps=False), Way("optimizer")], ["first", "none"])][::-1],
    ),
)
def test_lanes_that_run_no_layer_take_part(layout: str, step: tuple[Way, str], oracle: Oracle) -> None:
    """A stranger's encoder may leave out all layers where it has no picture: then there is no backward to wait in."""
    way, pictures = step
    assert oracle.check(distributed(table(SHY[layout], microbatches=4, pictures=pictures), way)) == ""


@pytest.mark.parametrize("shard", ["optimizer", "full"])
def test_what_is_made_a_step_ahead_is_gathered_too(shard: str, oracle: Oracle) -> None:
    """A frozen encoder's lanes meet in the middle of the step before, pictures or not."""
    modules = {"vision": on(0, 1, frozen=True, prefetch=True), "language": on(1, 2)}
    assert oracle.check(distributed(table(modules, microbatches=4, pictures="first"), Way(shard))) == ""


CROWDED: dict[str, Modules] = {
    "two encoders on one pair": {"vision": on(0, 1), "glyph": on(0, 1), "language": on(1, 2)},
    "lanes that are tensor ranks": {"vision": on(0, 2), "glyph": on(0, 2, tp=3), "language": on(1, 2)},
}
"""Several modules that talk over the same ranks."""


@pytest.mark.parametrize("layout", CROWDED)
def test_sums_of_several_modules_do_not_meet(layout: str, oracle: Oracle) -> None:
    """Where a schedule gives each rank an order of its own, they come to sums of two modules in different orders."""
    settings = scheduled(table(CROWDED[layout], microbatches=2, language={"tied": True, "layers": 4}), "ahead")
    assert oracle.check(distributed(settings, Way("optimizer"))) == ""
