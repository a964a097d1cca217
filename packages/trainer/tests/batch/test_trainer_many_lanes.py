"""What `mimo check` computes of all ranks takes work for each rank, not for each pair of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType

import pytest
from eye import make_job, on, table

from mimo.trainer import Job
from mimo.trainer.batch.balance import step_balance
from mimo.trainer.cost.memory import estimate_memory
from mimo.trainer.step.traffic import expect_traffic

COMPUTED: Mapping[str, Callable[[Job], object]] = {
    "memory": estimate_memory,
    "traffic": lambda job: list(expect_traffic(job, 1)),
    "balance": lambda job: step_balance(job, 1),
}


def with_lanes(lanes: int, *, sees: bool) -> Job:
    """Return a job whose language model, and encoder if it sees, have so many lanes on the same ranks."""
    names = ("eye", "language") if sees else ("language",)
    modules = {name: on(0, lanes - 1) for name in names}
    return make_job(table(modules, run={"steps": 1, "global_batch": lanes, "micro_batch": 1}, data={"samples": lanes}))


def calls(function: Callable[[Job], object], job: Job) -> int:
    """Return how many Python functions a call enters, each time that a generator resumes included."""
    entered = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal entered
        entered += event == "call"

    sys.setprofile(count)
    try:
        function(job)
    finally:
        sys.setprofile(None)
    return entered


@pytest.mark.parametrize("what", COMPUTED)
def test_twice_the_lanes_take_twice_the_work(what: str) -> None:
    """Work for each pair of lanes would take four times as much."""
    sees = what != "memory"  # whose estimate builds encoders, and this one is none
    calls(COMPUTED[what], with_lanes(2, sees=sees))  # what is computed once is
    few, many = (calls(COMPUTED[what], with_lanes(lanes, sees=sees)) for lanes in (64, 128))
    assert many < 2.1 * few
