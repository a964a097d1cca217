"""The oracle where ranks do what only GPUs do, and with the names that the oldest torch has.

Run are a few cases of the cover of `test_oracle_distributed`, which shows each feature beside each other one; all of it
runs in ``nox -s soak``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Modules
from devices import BRANCHES, meet_at_first_use, run_as_on_devices
from older_torch import NAMES, run_without_names
from oracle import Oracle
from tables import Table, scheduled, table
from test_oracle import CLEAR_SEEDS, SP, on
from test_oracle_distributed import CHOSEN, Way, distributed, settings_of
from test_oracle_schedules import Case

from mimo.testing import Pool

FULL, SUMS = Way("full"), Way("gradients", among=2)
FEW: dict[str, tuple[Modules, dict[str, Any], Way]] = {
    "tensor and context ranks, stages": (
        {"vision": on(0, 1, tp=2, **SP), "language": on(0, 7, cp=2, pp=2, tp=2, **SP)},
        {"recompute": "full"},
        FULL,
    ),
    "experts and two encoders": (
        {"vision": on(0, 1, cp=2), "glyph": on(1, 2), "language": on(1, 4, ep=2, dp=4)},
        CLEAR_SEEDS["softmax"][0],
        SUMS,
    ),
}


def _settings(name: str) -> Table:
    modules, language, way = FEW[name]
    language = {**language}
    recompute = language.pop("recompute", "none")
    modules = {**modules, "language": {**modules["language"], "recompute": recompute}}
    found = table(modules, microbatches=2, language=language, seed=CLEAR_SEEDS["softmax"][1])
    return distributed(scheduled(found, "1f1b"), way)


@pytest.fixture
def on_devices(pool: Pool, truths: Path) -> Oracle:
    """Layouts run as on GPUs."""
    return Oracle(pool, truths, layout=run_as_on_devices)


@pytest.fixture
def on_older_torch(pool: Pool, truths: Path) -> Oracle:
    """Layouts run without the names that torch 2.11 lacks."""
    return Oracle(pool, truths, layout=run_without_names)


@pytest.mark.each("name")
@pytest.mark.parametrize("name", FEW)
def test_branches_of_gpus_change_nothing(name: str, on_devices: Oracle) -> None:
    """Collectives instead of messages, channels of their own, backward in a thread, groups that connect late."""
    assert on_devices.check(on_devices.clear(_settings(name))) == ""


@pytest.mark.parametrize("name", FEW)
def test_names_of_older_torch_do(name: str, on_older_torch: Oracle) -> None:
    """Whatever torch 2.11 calls otherwise is met: gathers, scattered sums, the groups of FSDP2."""
    assert on_older_torch.check(on_older_torch.clear(_settings(name))) == ""


@pytest.mark.soak
@pytest.mark.parametrize(("case", "way", "weights"), sorted(CHOSEN, key=str), ids=str)
def test_branches_of_gpus_change_nothing_beside_any_choice(
    case: Case, way: Way | None, weights: str, on_devices: Oracle
) -> None:
    """The whole cover."""
    assert on_devices.check(settings_of(case, way, weights, on_devices)) == ""


@pytest.mark.soak
@pytest.mark.parametrize(("case", "way", "weights"), sorted(CHOSEN, key=str), ids=str)
def test_names_of_older_torch_do_beside_any_choice(
    case: Case, way: Way | None, weights: str, on_older_torch: Oracle
) -> None:
    """The whole cover."""
    assert on_older_torch.check(settings_of(case, way, weights, on_older_torch)) == ""


def _cross(rank: int) -> str:
    """Return what is raised where two ranks first use two groups in different orders."""
    both, again = dist.new_group([0, 1]), dist.new_group([0, 1])
    meet_at_first_use(seconds=1)
    try:
        for group in (both, again) if rank else (again, both):
            dist.all_reduce(torch.zeros(1), group=group)
    except AssertionError as error:
        return str(error).partition(":")[2]
    return ""


def test_first_uses_in_different_orders_are_seen(pool: Pool) -> None:
    """What stands in for NCCL's connections does wait for all members."""
    assert "" not in pool.run(2, _cross)


def test_names_that_are_forced_and_taken_away_are_there() -> None:
    """Else nothing would be."""
    assert all(answers.keys() <= vars(module).keys() for module, answers in BRANCHES.items())
    assert len(NAMES) == 2 or torch.__version__ < "2.13"
