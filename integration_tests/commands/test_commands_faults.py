"""What ends a run that was going well: a killed, stopped, sleeping or failing rank, signals, no finite numbers.

In these runs ranks 0 and 1 encode, and ranks 2 and 3 read together.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from cases import some
from commands import DIGITS, TEXT, install, losses, mimo, read_metrics, start, succeed

from mimo.testing import Ended

ENDLESS = "run.steps=1000000"
PATIENT = "run.timeout=5"

SLEEPS = """
import time
from mimo.hooks import hookimpl

@hookimpl
def mimo_step_begin(run, step):
    if step == 2 and run.rank == 1:
        time.sleep(1000)
"""
RAISES = """
import time
from mimo.hooks import hookimpl

@hookimpl
def mimo_step_begin(run, step):
    if step == 2 and run.rank == 1:
        time.sleep(3)  # in which the others come to where they wait
        raise RuntimeError("no more")
"""
FULL = """
import torch
from mimo.hooks import hookimpl

def refuse(*given, **named):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 is full")

@hookimpl
def mimo_step_begin(run, step):
    if step == 1:
        torch.nn.functional.scaled_dot_product_attention = refuse
"""


def waits(ended: Ended) -> list[str]:
    """Return the lines of ranks that waited, without seconds and the number of the step; those of others come last."""
    lines = ended.err.removeprefix("mimo: ").splitlines()
    found = [re.sub(r"waited \d+(\.\d)? s in step \d+,", "waited in", line) for line in lines if " waited " in line]
    assert all(" waited " in line for line in lines[: len(found)]), ended.err
    return found


def of_vision(rank: int) -> str:
    """Return what an encoding rank says of its wait for a gradient."""
    return (
        rf"rank {rank} waited in backward of vision stage 0, microbatch [01], for rank [23] \(edge vision->language\)"
    )


def of_language(rank: int, peer: int, how: str) -> str:
    """Return what a reading rank says of its wait for rows, or for the other half of them."""
    return rf"rank {rank} waited in \w+ of language stage 0, microbatch [01], for rank {peer} \({how}\)"


def matches(found: list[str], *expected: str) -> bool:
    """Return whether there are as many lines as patterns, and each fits its own."""
    fits = [re.fullmatch(pattern, line) for pattern, line in zip(expected, found, strict=False)]
    return len(found) == len(expected) and all(fits)


def test_a_killed_worker_ends_all_and_is_named(tmp_path: Path) -> None:
    """With code 3, once and last, on stderr and in the run directory; a lost connection is not taken for the cause."""
    with start(*DIGITS, ENDLESS, f"run.directory={tmp_path}") as started:
        started.wait_for("  loss  ")
        os.kill(started.workers()[2], signal.SIGKILL)
        ended = started.wait()
    reason = (
        "rank 2 was ended by signal 9 (SIGKILL). Something killed it; if nobody did, the machine ran out of memory.\n"
    )
    assert ended.code == 3
    assert ended.err.endswith(reason)
    assert "Traceback" not in ended.err
    assert ended.err == f"mimo: {(tmp_path / 'error.txt').read_text()}"


def test_a_stopped_worker_is_named_when_the_time_is_up(tmp_path: Path) -> None:
    """Those who wait for it say where and for whom, and write what they did with others; it says nothing more."""
    (tmp_path / "collectives_rank2.json").write_text("of an earlier run")
    environ = {**os.environ, "TORCH_FR_BUFFER_SIZE": "50"}
    with start(*DIGITS, ENDLESS, PATIENT, f"run.directory={tmp_path}", environ=environ) as started:
        started.wait_for(" 2/1000000")
        time.sleep(3)  # each rank reports once a second, and until then is known to load
        os.kill(started.workers()[2], signal.SIGSTOP)
        ended = started.wait()
    assert ended.code == 3
    written = {path.name: json.loads(path.read_bytes()) for path in tmp_path.glob("collectives_rank*.json")}
    assert set(written) == {f"collectives_rank{rank}.json" for rank in (0, 1, 3)}
    for recorded in written.values():
        assert 0 < len(recorded["entries"]) <= 50
        assert {entry["process_group"][1] for entry in recorded["entries"]}
        assert all(entry["profiling_name"].startswith("gloo:") for entry in recorded["entries"])
    *others, reason = ended.err.splitlines()
    assert re.fullmatch(
        "rank 2 no longer answers: it was killed or stopped, or a machine or its network is gone. "
        r"Rank 2 was last heard of in .*\.",
        reason,
    )
    assert len(others) == len(waits(ended)) > 0
    # It is named alone, or among all where they waited for each other at the end of a step.
    assert any(re.search(r"for (rank 2\b|ranks 0-3 )", line) for line in others), ended.err


def test_a_worker_that_sleeps_is_named_with_the_line_of_code(tmp_path: Path) -> None:
    """Each of those who wait names module, stage, microbatch and peer."""
    path = install(tmp_path / "site", "sleeper", SLEEPS, "mimo.lifecycle")
    ended = mimo(*DIGITS, ENDLESS, PATIENT, f"run.directory={tmp_path / 'run'}", path=path)
    assert ended.code == 3
    assert matches(
        waits(ended), of_vision(0), of_language(2, 3, "all_gather_single"), of_language(3, 1, "edge vision->language")
    ), ended.err
    reason = ended.err.splitlines()[-1]
    assert re.fullmatch(
        r"rank 1 did not go on for \d+(\.\d)? s in step 2, at sleeper, line 8\. run\.timeout is 5 s\.", reason
    )


def test_a_worker_that_fails_is_named_last_and_once(tmp_path: Path) -> None:
    """After those who waited for it, and its own traceback."""
    path = install(tmp_path / "site", "raiser", RAISES, "mimo.lifecycle")
    ended = mimo(*DIGITS, ENDLESS, f"run.directory={tmp_path / 'run'}", path=path)
    assert ended.code == 3
    assert matches(
        waits(ended)[-2:], of_language(2, 3, "all_gather_single"), of_language(3, 1, "edge vision->language")
    ), ended.err
    assert ended.err.count("Traceback") == 1
    assert ended.err.endswith("\nrank 1 failed: RuntimeError: no more\n")
    assert ended.err.count("no more") == 3  # its line of code, the traceback's last line, and the reason


def test_a_device_without_memory_left_says_what_would_fit(tmp_path: Path) -> None:
    """Once and last: the module, what it did, the estimate, and settings that take less: with them the run begins."""
    (tmp_path / "train.jsonl").write_text('{"text": "hello"}\n' * 4)
    (tmp_path / "text.toml").write_text(TEXT)
    path = install(tmp_path / "site", "filler", FULL, "mimo.lifecycle")
    ended = mimo("train", "text.toml", "run.micro_batch=2", cwd=tmp_path, path=path)
    assert ended.code == 3
    reason = ended.err.splitlines()[-1]
    assert reason.startswith(
        "mimo: rank 0: modules.language: expected what rank 0 holds of language to fit cpu in step 1, forward of "
        "language stage 0, microbatch 0; estimated are "
    )
    assert " got CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 is full. " in reason
    assert ended.err == f"mimo: {(tmp_path / 'run' / 'error.txt').read_text()}"
    assert "Traceback" not in ended.err
    succeed("train", "text.toml", "run.steps=1", cwd=tmp_path)  # into the same directory


def test_ctrl_c_ends_every_process(tmp_path: Path) -> None:
    """Sent to the whole group as a terminal does. It is said that nothing is saved yet."""
    with start(*DIGITS, ENDLESS, f"run.directory={tmp_path}") as started:
        started.wait_for(" 2/1000000  loss")
        os.killpg(started.pid, signal.SIGINT)
        ended = started.wait()
    assert (ended.code, ended.err) == (130, f"mimo: interrupted\nmimo: no step is saved in {tmp_path}\n")
    assert losses(tmp_path)


@pytest.mark.parametrize("everybody", some([False, True], {True}), ids=["the launcher", "its whole group"])
def test_sigterm_saves_and_leaves_with_0(everybody: bool, tmp_path: Path) -> None:
    """What clusters send before they take a machine away, to one process or to all."""
    with start(*DIGITS, ENDLESS, f"run.directory={tmp_path}") as started:
        started.wait_for(" 2/1000000  loss")
        (os.killpg if everybody else os.kill)(started.pid, signal.SIGTERM)
        ended = started.wait()
    assert ended.code == 0
    assert ended.err == "mimo: asked to stop: the step is finished and saved. A second signal ends all at once.\n"
    done = len(losses(tmp_path))
    assert f"digits: stopped as asked, step {done} of 1000000 is saved, in " in ended.out
    assert (tmp_path / "checkpoints" / "latest").read_text() == f"step_{done:08d}\n"
    assert not read_metrics(tmp_path)[1]
    more = succeed(*DIGITS, f"run.steps={done + 1}", "checkpoint.load=latest", f"run.directory={tmp_path}")
    assert f"digits: step {done + 1} to {done + 1} with" in more


def test_steps_that_are_not_finite_are_skipped_on_all_ranks(tmp_path: Path) -> None:
    """Every rank leaves its weights and moments as they were, and the run continues to its end."""
    diverges = ("run.steps=4", "optimizer.lr=1000", "optimizer.weight_decay=1000", "optimizer.clip=0")
    shown = succeed(*DIGITS, *diverges, "checkpoint.interval=1", "checkpoint.keep=0", f"run.directory={tmp_path}")
    assert shown.count("(skipped)") == 2
    steps = read_metrics(tmp_path)[0]
    assert [step["skipped"] for step in steps] == [False, False, True, True]
    assert steps[2]["loss"] is None
    first, last = (sorted((tmp_path / "checkpoints" / f"step_{step:08d}").glob("*.safetensors")) for step in (2, 4))
    assert len(first) == 4
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in last]
