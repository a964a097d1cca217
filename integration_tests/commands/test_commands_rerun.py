"""`mimo train` with numbers that go wrong: exit codes, what is said, and restarts as a user or a cluster makes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import losses, mimo

from mimo.testing import Ended

WORDS = (
    "train",
    "examples/digits.toml",
    "run.global_batch=8",
    "run.micro_batch=4",
    "run.steps=4",
    "run.evaluation_interval=0",
    "data.held_out=0.01",
    "optimizer.lr_schedule=constant",
    "optimizer.lr_min=0",
)
JUDGED = (*WORDS, "rerun.mode=validate")
LAYOUTS = {
    "disjoint": (),
    "colocated": ("modules.vision.ranks=0-1", "modules.language.ranks=0-1", "modules.language.tp=2"),
}


def corrupting(module: str, rank: int) -> tuple[str, ...]:
    """Return settings that make a fault in step 3, and in all runs of it."""
    return ("rerun.inject.step=3", f"rerun.inject.module={module}", f"rerun.inject.rank={rank}")


def verdicts(run: Path) -> list[dict[str, Any]]:
    """Return the events of a run directory."""
    return [json.loads(line) for line in (run / "rerun.jsonl").read_text().splitlines()]


def check_event(event: dict[str, Any], verdict: str, module: str, rank: int, device: str) -> None:
    """Refuse an event that does not name this."""
    assert (event["step"], event["verdict"], event["module"]) == (3, verdict, module)
    assert (event["ranks"], event["devices"]) == ([rank], [device])


def test_a_result_that_stays_is_rejected_until_its_step_is_left_out(tmp_path: Path) -> None:
    """16 at first, 17 on another device; the step is then left out, and the run ends well."""
    words = (*JUDGED, *LAYOUTS["colocated"], *corrupting("vision", 1), f"run.directory={tmp_path}")
    first = mimo(*words, "rerun.device=a")
    seen = (
        "got a loss that is not finite, also when run again; suspected: the forward of vision stage 0 for microbatch 0 "
    )
    assert first.code == 16
    assert f"step 3: expected a result that can be right, {seen}on rank 1 (a/1)." in first.err
    assert "Restart with checkpoint.load=latest and these ranks on other devices" in first.err
    assert first.err.count("\n") == 1
    other = mimo(*words, "rerun.device=b", "checkpoint.load=latest")
    assert other.code == 17
    assert "first seen in the forward of vision stage 0 for microbatch 0 on rank 1 (a/1), and so on" in other.err
    assert "the model or the data make it so. Leave the step out with rerun.skip_steps=[3]" in other.err
    assert (tmp_path / "error.txt").read_text() in other.err
    last = mimo(*words, "rerun.device=b", "checkpoint.load=latest", "rerun.skip_steps=[3]")
    assert (last.code, last.err) == (0, "mimo: step 3: left out, as rerun.skip_steps says\n")
    *found, skipped = verdicts(tmp_path)
    wanted = [("reproduced", "a/1"), ("correct", "b/1")]
    for event, (verdict, device) in zip(found, wanted, strict=True):
        check_event(event, verdict, "vision", 1, device)
    assert skipped["verdict"] == "skipped"
    assert [one["loss"] for one in found[0]["runs"]] == ["nan", "nan"]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("layout", "module", "rank"),
    [
        ("disjoint", "language", 2),
        ("disjoint", "vision", 1),
        ("colocated", "vision", 0),
        ("colocated", "language", 1),
    ],
)
def test_a_device_at_fault_is_named_after_the_restart(layout: str, module: str, rank: int, tmp_path: Path) -> None:
    """On another device the step has another result, and the run continues and ends as one that was not disturbed."""
    laid = LAYOUTS[layout]
    words = (
        *JUDGED,
        *laid,
        *corrupting(module, rank),
        f"rerun.inject.device=a/{rank}",
        f"run.directory={tmp_path / 'run'}",
    )
    assert mimo(*words, "rerun.device=a").code == 16
    again = mimo(*words, "rerun.device=b", "checkpoint.load=latest")
    assert again.code == 0
    assert (
        f"the device was at fault in the forward of {module} stage 0 for microbatch 0 on rank {rank} (a/{rank})"
        in again.err
    )
    check_event(verdicts(tmp_path / "run")[-1], "persistent", module, rank, f"a/{rank}")
    plain(laid, tmp_path / "plain")
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")


@pytest.mark.soak
def test_a_fault_that_has_passed_is_reported_and_the_run_continues(tmp_path: Path) -> None:
    """With the losses of a run that was not disturbed."""
    words = (*JUDGED, *corrupting("vision", 0), "rerun.inject.times=1", f"run.directory={tmp_path / 'run'}")
    found = mimo(*words, "rerun.device=a")
    assert found.code == 0
    assert found.err == (
        "mimo: step 3: a loss that is not finite, and not so when run again: a fault that has passed, of the forward "
        "of vision stage 0 for microbatch 0 on rank 0 (a/0); the run goes on\n"
    )
    (event,) = verdicts(tmp_path / "run")
    check_event(event, "transient", "vision", 0, "a/0")
    plain((), tmp_path / "plain")
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")


def plain(words: tuple[str, ...], directory: Path) -> Ended:
    """Run without judging anything."""
    ended = mimo(*WORDS, *words, f"run.directory={directory}")
    assert ended.code == 0
    return ended
