"""Steps and microbatches of so many tokens, beside the truth, which counts tokens by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from cases import Modules, in_turn
from jobs import make_job
from oracle import Oracle
from tables import SCHEDULES, Table, by_tokens, table
from test_oracle import SP, on

from mimo.trainer.runtime import StepData, StepSamples

LAYOUTS: dict[str, tuple[Modules, str]] = {
    "colocated, lanes 3": ({"vision": on(0, 2), "language": on(0, 2)}, "1f1b"),
    "two encoders, language pp2 dp2": (
        {"vision": on(0, 2), "glyph": on(3, 4), "language": on(4, 7, pp=2)},
        "zb-h1",
    ),
    "vision passes over 2, language cp2 tp2 sp": (
        {"vision": {**on(0, 2), "batch_factor": 2}, "language": on(0, 3, cp=2, tp=2, **SP)},
        "gpipe",
    ),
    "vision ahead, language pp2 in chunks": (
        {"vision": {**on(0, 2), "frozen": True, "prefetch": True}, "language": {**on(1, 4, pp=2), "chunks": 2}},
        "interleaved",
    ),
    "vision pp2, language pp3 dp2": ({"vision": on(0, 3, pp=2), "language": on(2, 7, pp=3)}, "ahead"),
}
EXPERTS = {"experts": 4, "experts_per_token": 2, "dense_layers": 1, "balance_loss": 0.05, "next_tokens": 1}


def settings_of(layout: str, balance: str, **more: Any) -> Table:
    """Return the settings of a layout: steps of 240 tokens, microbatches of 60 a lane."""
    modules, schedule = LAYOUTS[layout]
    settings = table(modules, pictures="many", weights="mixed", language=more.get("language"))
    settings["schedule"] = dict(SCHEDULES[schedule])
    settings["data"]["balance"] = balance
    if "chunks" in modules["language"]:
        settings["modules"]["language"]["config"] = {**settings["modules"]["language"]["config"], "layers": 4}
    return by_tokens(settings, batch_tokens=240, micro_tokens=60, longer=more.get("longer", "cut"))


@pytest.mark.parametrize(("layout", "balance"), in_turn(LAYOUTS, ["cost", "count"]))
def test_steps_by_tokens_are_those_of_a_plain_loop(layout: str, balance: str, oracle: Oracle) -> None:
    """Loss, gradients and weights, however many microbatches a step has, some of them empty."""
    assert oracle.check(settings_of(layout, balance)) == ""


def test_samples_that_are_dropped_belong_to_no_step(oracle: Oracle) -> None:
    """The others move up."""
    settings = settings_of("colocated, lanes 3", "cost", longer="drop")
    settings["data"]["max_tokens"] = 20
    assert oracle.check(settings) == ""


@pytest.mark.soak
def test_lanes_without_samples_have_experts_too(oracle: Oracle) -> None:
    """All ranks of a stage meet for them in each microbatch."""
    settings = settings_of("two encoders, language pp2 dp2", "cost", language=EXPERTS)
    settings["modules"]["language"] |= {"ep": 2}
    assert oracle.check(settings) == ""


def test_these_steps_are_uneven_and_some_lanes_empty() -> None:
    """They have several numbers of samples and microbatches, and no lane more tokens than it may."""
    job = make_job(settings_of("two encoders, language pp2 dp2", "count"))
    assert job.train is not None
    samples = StepSamples(job, job.sample_order())
    steps = [StepData.of_step(job, job.train, partial(samples.numbers, step), costs=None) for step in range(1, 4)]
    assert len({len(step.layouts) for step in steps}) > 1
    filled = [
        sum(len(layout.tokens) for layout in microbatch.lane_layouts(job.language, lane))
        for step in steps
        for microbatch in step.microbatches
        for lane in range(job.language.grid.dp)
    ]
    assert min(filled) == 0
    assert max(filled) <= 60
    assert len({plan.microbatches for plan in job.plans}) > 1
