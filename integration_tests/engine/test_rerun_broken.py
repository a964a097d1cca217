"""A step that is run again has the samples and leaves out those that it did before, also after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rerunning import events, run, with_rerun
from tables import by_tokens
from test_oracle_loading import with_broken

from mimo.hooks import RestartNeededError
from mimo.testing import Pool

LAYOUT = "two encoders, colocated, tp2 and cp2"


def test_a_step_that_is_run_again_leaves_out_the_same_samples(tmp_path: Path, pool: Pool) -> None:
    """Its loss and gradients are those of a run without a fault, and the steps after it too."""
    settings = with_broken(LAYOUT, "by two threads, three steps ahead, each item once")
    plain = run(pool, with_rerun(settings, tmp_path / "plain", mode="validate"))
    inject = {"step": 2, "rank": 0, "module": "vision", "times": 1}
    passed = run(pool, with_rerun(settings, tmp_path / "passed", mode="validate", inject=inject))
    assert events(tmp_path / "passed")[0]["verdict"] == "transient"
    assert [one.steps for one in passed] == [one.steps for one in plain]
    assert [one.held for one in passed] == [one.held for one in plain]


@pytest.mark.soak
@pytest.mark.parametrize("tokens", [False, True])
def test_a_step_that_is_run_again_after_a_restart_leaves_out_the_same_samples(
    tokens: bool, tmp_path: Path, pool: Pool
) -> None:
    """From what was read before it, whatever could be read now; steps by tokens resume at their cursor."""
    settings = with_broken(LAYOUT, "by two threads, three steps ahead, each item once")
    if tokens:
        settings = by_tokens(settings, batch_tokens=240, micro_tokens=60)
    plain = run(pool, with_rerun(settings, tmp_path / "plain", mode="validate"))
    rerun: dict[str, Any] = {"mode": "validate", "inject": {"step": 2, "rank": 0, "module": "vision", "device": "a/0"}}
    waiting = run(pool, with_rerun(settings, tmp_path / "waits", device="a", **rerun))
    assert {one.code for one in waiting} == {RestartNeededError.exit_code}
    resumed = run(pool, with_rerun(settings, tmp_path / "waits", "latest", device="b", **rerun))
    assert [one.steps for one in resumed] == [one.steps[1:] for one in plain]
