"""One run directory, one run: how a second one is refused, who holds the directory, and when it is free again."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import TEXT, losses, mimo, places, start, write_lines

from mimo.testing import SECONDS, Started

ENDLESS = ("train", "text.toml", "run.steps=1000000", "logging.interval=1", "checkpoint.interval=1000000")
RESUMED = (*ENDLESS, "checkpoint.load=latest")
HELD = "run.directory: expected a folder into which no other run writes, got 'run', which is held by process "


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model that reads text alone, on two processes."""
    write_lines(tmp_path / "train.jsonl", [{"text": f"line {number}"} for number in range(4)])
    (tmp_path / "text.toml").write_text(TEXT.replace('ranks = "0"', 'ranks = "0-1"'))
    return tmp_path


def holds(pid: int, folder: Path) -> bool:
    """Return whether a process has the lock file open."""
    links = Path(f"/proc/{pid}/fd").iterdir()
    return (folder / "run" / "run.lock").resolve() in [link.resolve() for link in links]  # also if one is closed by now


def snapshot(run: Path) -> dict[str, bytes]:
    """Return the files of a run directory that no step of a run in it writes."""
    return {name: (run / name).read_bytes() for name in ("run.lock", "config.toml", "plan.json")}


def test_a_second_run_is_refused_while_the_first_lives(folder: Path) -> None:
    """By train and check, before a file is touched; commands that only read need no lock, and others' machines none."""
    with start(*ENDLESS, "checkpoint.interval=1", cwd=folder) as first:
        first.wait_for(" 2/1000000  loss")
        before = snapshot(folder / "run")
        for command in ("train", "check"):
            ended = mimo(command, *RESUMED[1:], cwd=folder)
            assert ended.refused(f"{HELD}{first.pid} on ", " since 20", " UTC. Wait for that run to end, or stop it;")
        assert snapshot(folder / "run") == before
        assert [holds(pid, folder) for pid in (first.pid, *first.workers())] == [True, True, False]
        assert mimo("checkpoint", "verify", "run", cwd=folder).code == 0
        assert mimo("check", *RESUMED[1:], "--elsewhere", cwd=folder).code == 0
        reshard = ("checkpoint", "reshard", "run/checkpoints/step_00000001")
        added = mimo(*reshard, "run/checkpoints/step_10000000", cwd=folder)
        assert added.refused("run.directory: expected a folder into which no other", f"process {first.pid} on ")
        assert mimo(*reshard, "beside", cwd=folder).printed == "beside/step_00000001\n"
        first.process.terminate()
        ended = first.wait()
    assert (ended.code, ended.err.count("\n")) == (0, 1), ended
    steps = len(losses(folder / "run"))
    assert f"text: step {steps + 1} to {steps + 2}" in mimo(*RESUMED, f"run.steps={steps + 2}", cwd=folder).printed


def test_a_run_whose_launcher_is_killed_holds_on_until_its_ranks_have_ended(folder: Path) -> None:
    """Nothing has to be removed by hand: the kernel releases the lock."""
    with start(*ENDLESS, cwd=folder) as first:
        first.wait_for(" 2/1000000  loss")
        rank_0, _ = first.workers()
        os.kill(rank_0, signal.SIGSTOP)
        os.kill(first.pid, signal.SIGKILL)
        first.process.join()
        assert mimo(*RESUMED, cwd=folder).refused(f"{HELD}{first.pid} on ")
        os.kill(rank_0, signal.SIGKILL)
        assert mimo(*RESUMED, "run.steps=2", cwd=folder).code == 0


def join(folder: Path, then: Callable[[Started], None], *words: str, **environ: str) -> list[Started]:
    """Start both ranks of a job by themselves, as srun does, let something happen, and return them when they ended."""
    one, other = places(2, **environ)
    with start(*words, cwd=folder, environ=one) as first, start(*words, cwd=folder, environ=other) as second:
        then(first)
        for started in (first, second):
            started.wait()
    return [first, second]


def test_a_job_that_another_one_keeps_out_ends_on_all_ranks_and_writes_nothing(folder: Path) -> None:
    """Rank 0 takes the directory before anybody writes there, and says once why it can't."""
    with start(*ENDLESS, cwd=folder) as holder:
        holder.wait_for(" 2/1000000  loss")
        before = snapshot(folder / "run")
        (folder / "run" / "attempt.json").write_text("somebody else's")
        ended = join(folder, lambda _first: None, *RESUMED, SLURM_JOB_ID="8")
        assert [one.process.exitcode for one in ended] == [2, 2]
        printed = [bytes(one.printed[one.err]).decode() for one in ended]
        assert printed[0].startswith(f"mimo: rank 0: {HELD}{holder.pid} on ")
        assert printed[1] == ""
        assert snapshot(folder / "run") == before
        assert (folder / "run" / "attempt.json").read_text() == "somebody else's"
        assert not (folder / "run" / "error.txt").exists()


def test_a_requeued_job_waits_for_its_old_one(folder: Path) -> None:
    """The old run saves, as its signal says; the new one resumes after that."""
    one, other = places(2, SLURM_JOB_ID="7")
    with start(*ENDLESS, cwd=folder, environ=one) as first, start(*ENDLESS, cwd=folder, environ=other) as second:
        first.wait_for(" 2/1000000  loss")

        def stop_the_old(new: Started) -> None:
            while b"waits up to 60 s for process " not in new.printed[new.err]:
                assert new._listen(time.monotonic() + SECONDS)
            assert json.loads((folder / "run" / "run.lock").read_text())["pid"] == first.pid
            first.process.terminate()
            assert (first.wait().code, second.wait().code) == (0, 0)

        ended = join(folder, stop_the_old, *RESUMED[:2], "run.steps=3", SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1")
    assert [one.process.exitcode for one in ended] == [0, 0]
    printed = bytes(ended[0].printed[ended[0].out]).decode()
    assert re.search(r"text: (nothing left to train, step \d+ of 3 was loaded|step \d+ to \d+)", printed), printed
