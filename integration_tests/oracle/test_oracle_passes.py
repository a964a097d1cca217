"""One pass of an encoder serves several microbatches of the language model, and nothing else changes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
from cases import Modules
from jobs import make_job
from oracle import Oracle
from tables import SAMPLES, table
from test_oracle import SP, on

from mimo.schedule import Route
from mimo.trainer.runtime import RouteCache, StepData

MICROBATCHES = 4
PASSES: dict[str, Modules] = {
    "alone": {"vision": on(0, 0), "language": on(0, 0)},
    "disjoint": {"vision": on(0, 0), "language": on(1, 1)},
    "disjoint, lanes 2 to 3": {"vision": on(0, 1), "language": on(2, 4)},
    "disjoint, language pp2": {"vision": on(0, 0), "language": on(1, 2, pp=2)},
    "colocated, vision dp4, language tp2 dp2": {"vision": on(0, 3), "language": on(0, 3, tp=2)},
    "colocated, pipelines in both": {"vision": on(0, 1, pp=2), "language": on(0, 1, pp=2)},
    "vision tp2": {"vision": on(0, 1, tp=2), "language": on(1, 2)},
    "vision sp": {"vision": on(0, 1, tp=2, **SP), "language": on(2, 2)},
    "vision sp pp3": {"vision": on(0, 5, tp=2, pp=3, **SP), "language": on(5, 6)},
    "vision cp2": {"vision": on(0, 1, cp=2), "language": on(1, 2, tp=2)},
    "vision cp3 pp2, language cp2 dp2, overlapping": {"vision": on(0, 5, cp=3, pp=2), "language": on(4, 7, cp=2)},
    "vision cp2 tp2 sp on the language's": {
        "vision": on(0, 3, cp=2, tp=2, **SP),
        "language": on(0, 3, cp=2, tp=2, **SP),
    },
    "two encoders, one of slices": {"vision": on(0, 1, cp=2), "glyph": on(2, 3), "language": on(3, 4, tp=2, **SP)},
}


def found(modules: Modules, factors: Mapping[str, int], oracle: Oracle, *, pictures: str = "mixed") -> str:
    """Return the differences from the oracle, a line each, where an encoder's passes serve as many microbatches."""
    keys: dict[str, dict[str, Any]] = {name: dict(of) for name, of in modules.items()}
    for name, factor in factors.items():
        keys[name]["batch_factor"] = factor
    return oracle.check(table(keys, microbatches=MICROBATCHES, pictures=pictures))


@pytest.mark.soak  # every time: in `test_oracle_distributed`, beside all that the table's layouts have
@pytest.mark.parametrize(("layout", "factor"), [*product(PASSES, [2, 3])])
def test_a_pass_may_serve_several_microbatches(layout: str, factor: int, oracle: Oracle) -> None:
    """Loss, gradients and weights are the same when an encoder encodes 2 microbatches at once, or 3 and then 1."""
    others = {"glyph": 5 - factor} if "glyph" in PASSES[layout] else {}
    assert found(PASSES[layout], {"vision": factor, **others}, oracle) == ""


@pytest.mark.parametrize(
    ("layout", "pictures"),
    [(layout, "first") for layout in ("vision sp", "vision cp3 pp2, language cp2 dp2, overlapping", "disjoint")]
    + [(layout, "none") for layout in ("disjoint", "vision sp pp3")],
)
def test_passes_without_items_are_ordinary(layout: str, pictures: str, oracle: Oracle) -> None:
    """Some or all microbatches of a pass may be empty."""
    assert found(PASSES[layout], {"vision": 3}, oracle, pictures=pictures) == ""


@pytest.mark.parametrize(
    ("layout", "frozen"),
    [("disjoint", True), ("vision sp pp3", True), ("vision cp2", ["encoder"]), ("vision sp pp3", ["encoder"])],
)
def test_passes_of_what_is_frozen(layout: str, frozen: bool | list[str], oracle: Oracle) -> None:
    """Stages that run no backward, and a projector behind them that does, serve several microbatches too."""
    modules = {name: dict(keys) for name, keys in PASSES[layout].items()}
    modules["vision"]["frozen"] = frozen
    assert found(modules, {"vision": 2}, oracle) == ""


@pytest.mark.parametrize("layout", ["vision cp2", "vision sp pp3", "disjoint"])
def test_routes_are_remembered_by_the_pass_where_it_decides_them(layout: str) -> None:
    """A microbatch seen before goes other ways if others share its pass, where ranks hold slices of the pass."""
    modules = {name: dict(keys) for name, keys in PASSES[layout].items()}
    modules["vision"]["batch_factor"] = 2
    job = make_job(table(modules, microbatches=MICROBATCHES))
    dataset, each = job.train, SAMPLES // MICROBATCHES
    assert dataset is not None

    def cut(first: int, cache: RouteCache | None = None) -> StepData:
        samples = [*range(first, first + each), *range(2 * each)]
        return StepData.cut(job, dataset, samples, microbatches=MICROBATCHES, routes=cache)

    def routes(first: int, cache: RouteCache) -> list[Route]:
        microbatch = cut(first, cache).microbatches[1]
        return [microbatch.route(edge, rank) for edge in job.graph.edges for rank in job.edge_ranks(edge)]

    def rows(first: int) -> int:
        return sum(item.rows for layout in cut(first).microbatches[0].layouts for item in layout.items)

    other = next(first for first in range(len(dataset)) if rows(first) != rows(0))
    cache = RouteCache()
    seen, again = routes(0, cache), routes(other, cache)
    assert again == routes(other, RouteCache())
    assert (again == seen) == (layout == "disjoint")
