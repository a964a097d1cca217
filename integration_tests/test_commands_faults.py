"""What ends a run that was going well: a killed worker, Ctrl-C, numbers that are not finite."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from commands import SCRIPT, losses, read_metrics, start, succeed

WORDS = (
    "train",
    "examples/digits.toml",
    "run.global_batch=8",
    "run.micro_batch=4",
    "run.evaluation_interval=0",
    "data.held_out=0.01",
    "optimizer.lr_schedule=constant",
    "optimizer.lr_min=0",
    "logging.interval=1",
)
ENDLESS = "run.steps=1000000"


def test_a_killed_worker_ends_all_and_is_named(tmp_path: Path) -> None:
    """With code 3, once, on stderr and in the run directory; a peer's lost connection is not taken for the cause."""
    with start(SCRIPT, *WORDS, ENDLESS, f"run.directory={tmp_path}") as started:
        started.wait_for("  loss  ")
        os.kill(started.workers()[2], signal.SIGKILL)
        ended = started.wait()
    reason = (
        "rank 2 was ended by signal 9 (SIGKILL). Something killed it; if nobody did, the machine ran out of memory.\n"
    )
    assert (ended.code, ended.err) == (3, f"mimo: {reason}")
    assert (tmp_path / "error.txt").read_text() == reason


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_ends_every_process(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """Sent to the whole group as a terminal does; asked to end by a batch system alike. The run can go on later."""
    with start(SCRIPT, *WORDS, ENDLESS, f"run.directory={tmp_path}") as started:
        started.wait_for(" 2/1000000  loss")
        os.killpg(started.process.pid, number)
        ended = started.wait()
    assert (ended.code, ended.err) == (code, "mimo: interrupted\n")
    assert losses(tmp_path)


def test_steps_that_are_not_finite_are_skipped_alike(tmp_path: Path) -> None:
    """Every rank leaves its weights and moments as they were, and the run goes on to its end."""
    diverges = ("run.steps=3", "optimizer.lr=1e30", "optimizer.clip=0")
    shown = succeed(*WORDS, *diverges, "checkpoint.interval=1", "checkpoint.keep=0", f"run.directory={tmp_path}")
    assert shown.count("(skipped)") == 2
    steps = read_metrics(tmp_path)[0]
    assert [step["skipped"] for step in steps] == [False, True, True]
    assert steps[1]["loss"] is None
    first, last = (sorted((tmp_path / "checkpoints" / f"step_{step:08d}").glob("*.safetensors")) for step in (1, 3))
    assert len(first) == 4
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in last]
