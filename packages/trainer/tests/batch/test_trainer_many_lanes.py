"""What `mimo check` computes of all ranks takes work for each rank, not for each pair of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import pytest

from mimo.trainer import Job, read_settings, resolve
from mimo.trainer.batch.balance import step_balance
from mimo.trainer.cost.memory import estimate_memory
from mimo.trainer.step.traffic import expect_traffic

SIZES: Mapping[str, Any] = {"layers": 1, "heads": 1, "intermediate": 4}
COMPUTED: Mapping[str, Callable[[Job], object]] = {
    "memory": estimate_memory,
    "traffic": lambda job: list(expect_traffic(job, 1)),
    "balance": lambda job: step_balance(job, 1),
}


def with_lanes(lanes: int) -> Job:
    """Return a job whose encoder and language model have so many lanes on the same ranks."""
    where = {"ranks": f"0-{lanes - 1}", "dp": lanes}
    settings = {
        "run": {"name": "lanes", "steps": 1, "micro_batch": 1, "global_batch": lanes},
        "data": {"plugin": "mock", "samples": lanes, "images": 1, "text": 4, "height": 8, "width": 8},
        "modules": {
            "vision": {"plugin": "vit", "config": {"patch": 8, "width": 4, **SIZES}, **where},
            "language": {"plugin": "decoder", "config": {"hidden": 4, **SIZES}, **where},
        },
    }
    return resolve(read_settings(settings))


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
    calls(COMPUTED[what], with_lanes(2))  # what is computed once is
    few, many = (calls(COMPUTED[what], with_lanes(lanes)) for lanes in (64, 128))
    assert many < 2.1 * few
