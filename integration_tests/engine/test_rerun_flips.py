"""A bit that flips in a run, whoever makes it flip, is found by what passes come to, and given to where it was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from flipping import Bits, Flip, run_clean, run_with_a_number, run_with_flips, settings_of, spots
from jobs import make_job
from rerunning import events
from tables import world_of

from mimo.testing import Pool
from mimo.topology import StageId

LAYOUTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "alone": {"vision": {"ranks": [0]}, "language": {"ranks": [0]}},
    "disjoint": {"vision": {"ranks": [0, 1]}, "language": {"ranks": [2, 3], "tp": 2}},
    "colocated": {"vision": {"ranks": [0, 1]}, "language": {"ranks": [0, 1]}},
    "pipelined": {"vision": {"ranks": [0, 1], "pp": 2}, "language": {"ranks": [2, 3], "pp": 2}},
}
SHARES: Mapping[Bits, str] = {
    "growing": "2 to 2^16 times as large",
    "shrinking": "smaller",
    "sign": "of the other sign",
    "fraction": "of another fraction",
}
STEPS, PART = 2000, 100


def flip(pool: Pool, layout: str, directory: Path, bits: Bits, count: int, seed: int) -> list[Flip]:
    """Train while bits flip; return at least ``count`` that have. More are asked for, as passes may be empty."""
    drawn = count * 5 // 4
    settings = settings_of(LAYOUTS[layout], directory, steps=10 + 3 * drawn)
    found = pool.run(world_of(settings), run_with_flips, settings, bits, drawn, seed)
    flips = sorted((one for own in found for one in own), key=lambda one: one.spot.step)
    assert {one.spot for one in flips} <= set(spots(make_job(settings).graph, drawn, seed))
    assert len(flips) >= count
    return flips


def found_of(flips: Iterable[Flip], directory: Path) -> list[Flip]:
    """Return those that an event names rightly; there is no event of anything else."""
    by_step = {event["step"]: event for event in events(directory)}
    assert by_step.keys() <= {one.spot.step for one in flips}
    return [one for one in flips if one.spot.step in by_step and one.is_named_by(by_step[one.spot.step])]


@pytest.mark.parametrize(
    ("layout", "count", "seed"),
    [
        ("alone", 4, 1),
        *(pytest.param(layout, 10, seed, marks=pytest.mark.soak) for layout in LAYOUTS for seed in (2, 3, 4)),
    ],
)
def test_what_is_suddenly_huge_is_found(layout: str, count: int, seed: int, tmp_path: Path, pool: Pool) -> None:
    """Every flip that makes a number 2^32 times as large or more, or not finite, by module, stage, rank and pass."""
    flips = flip(pool, layout, tmp_path, "huge", count, seed)
    assert all(not one.factor < 2**32 for one in flips)
    found = found_of(flips, tmp_path)
    print(f"{layout}, seed {seed}: {len(found)} of {len(flips)} huge flips found and named")
    assert [one for one in flips if one not in found] == []


def test_a_projector_behind_a_tower_a_step_ahead_is_judged(tmp_path: Path, pool: Pool) -> None:
    """As a stage of its encoder: it has a past of its own, and what is suddenly huge in it is given to it."""
    ahead = {"ranks": [0], "frozen": ["encoder"], "prefetch": True}
    settings = settings_of({**LAYOUTS["alone"], "vision": ahead}, tmp_path, steps=9)
    pool.run(1, run_with_a_number, settings, StageId("vision", 1), 9, 1e38)
    (event,) = events(tmp_path)
    assert (event["step"], event["verdict"], event["what"]) == (9, "transient", "forward")
    assert (event["module"], event["stage"], event["ranks"]) == ("vision", 1, [0])


@pytest.mark.soak
@pytest.mark.parametrize("bits", SHARES)
def test_how_many_of_the_others_are_found_is_printed(bits: Bits, tmp_path: Path, pool: Pool) -> None:
    """Nothing is promised of them: a number that is smaller, or a little larger, may be a right one."""
    flips = flip(pool, "alone", tmp_path, bits, 30, 5)
    assert {one.factor >= 2**32 for one in flips} == {False}
    found = found_of(flips, tmp_path)
    print(f"{len(found)} of {len(flips)} flips found and named that make a number {SHARES[bits]}")


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_clean_run_of_ragged_samples_rejects_nothing(tmp_path: Path, pool: Pool) -> None:
    """In 2,000 steps, while the learning rate warms up and after each of nineteen resumes too."""
    settings = settings_of(LAYOUTS["alone"], tmp_path, steps=STEPS)
    for first in range(1, STEPS + 1, PART):
        if first > 1:
            settings["checkpoint"] = {"load": "latest"}
        (loss,) = pool.run(1, run_clean, settings, first, first + PART - 1)
        print(f"step {first + PART - 1}: loss {loss:.4f}, {len(events(tmp_path))} events")
    assert events(tmp_path) == []
