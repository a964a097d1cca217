"""Ranks that torchrun or Slurm started: each a process by itself, without a launcher of ours."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path

from launching import finish, join, start


def is_free(port: int) -> bool:
    """Return whether nobody listens on a port of this machine."""
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False


def test_tasks_of_srun_meet_without_a_given_address(tmp_path: Path) -> None:
    """On a port that follows from the ids of their job and step."""
    job = next(job for job in range(os.getpid(), os.getpid() + 1000) if is_free(20_000 + job * 61 % 10_000))
    step = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    step |= {"SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "gpu01"}
    body = """
    print(together(), process.rank, process.local_rank)
"""
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in ("0", "1"):
            (tmp_path / rank).mkdir()
            task = {**step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}
            ranks.append(stack.enter_context(start(tmp_path / rank, body, task)))
        assert [finish(one) for one in ranks] == [(0, "2 0 0\n", ""), (0, "2 1 1\n", "")]


def test_joined_ranks_name_one_that_died(tmp_path: Path) -> None:
    """Where no launcher of ours sees it: who loses a connection asks all, and one doesn't answer."""
    body = """
    reported, report_status = threading.Event(), Watchdog._report_status
    process.heartbeat.enter("the test")
    Watchdog._report_status = lambda watch: (report_status(watch), reported.set())
    together()
    if process.rank == 2:
        assert reported.wait(60)
        os.kill(os.getpid(), signal.SIGKILL)
    together()
"""
    ended = join(tmp_path, body, 3)
    assert [code for code, _, _ in ended] == [3, 3, -signal.SIGKILL]
    (text,) = (err for _, _, err in ended if err)
    assert text.endswith(
        "rank 2 no longer answers: it was killed or stopped, or a machine or its network is gone. "
        "Rank 2 was last heard of in the test.\n"
    ), text
    assert "Traceback" not in text


def test_joined_ranks_say_that_the_one_in_which_all_meet_is_gone(tmp_path: Path) -> None:
    """Rank 1 says so, as nobody is left to agree with."""
    body = """
    process.heartbeat.enter("the test")
    together()
    if process.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
"""
    ended = join(tmp_path, body, 3)
    assert [code for code, _, _ in ended] == [-signal.SIGKILL, 3, 3]
    expected = (
        "mimo: The process in which all ranks meet is gone: rank 0, or what started it. Rank 1 was in the test.\n"
    )
    assert ended[1][2].endswith(expected)  # after what torch says of the lost connection
    assert "mimo:" not in ended[2][2]


def test_joined_ranks_all_end_with_the_code_of_the_first_and_only_that_one_reports(tmp_path: Path) -> None:
    """Under torchrun or Slurm each process is one rank, the store in rank 0 of them or in their launcher."""
    body = """
    together()
    if process.rank == 1:
        raise DataError("train.jsonl:3", expected="text", got="none")
    together()
"""
    ended = join(tmp_path, body, 3)
    assert [code for code, _, _ in ended] == [3, 3, 3]
    assert [err.count("rank 1: train.jsonl:3: expected text, got none.") for _, _, err in ended] == [0, 1, 0]
    assert (tmp_path / "1" / "error.txt").exists()


def test_the_rank_that_hosts_the_store_outlives_those_that_have_not_heard_yet(tmp_path: Path) -> None:
    """Rank 1 is stopped while the others end: it takes the code of the fault, and names nobody."""
    body = """
    class Wanted(UserError):
        exit_code = 16

    together()
    if process.rank == 1:
        import subprocess
        subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    if process.rank == 2:
        time.sleep(0.5)
        raise Wanted("step 3", expected="a restart", got="none")
    time.sleep(60)
"""
    ended = join(tmp_path, body, 3)
    assert [code for code, _, _ in ended] == [16, 16, 16]
    assert [err for _, _, err in ended] == ["", "", "mimo: rank 2: step 3: expected a restart, got none.\n"]


def test_a_rank_that_fails_while_others_are_late_keeps_its_reason(tmp_path: Path) -> None:
    """What lies there from an earlier run is deleted by rank 0, once all have met; a late one deletes nothing."""
    reason, is_open = tmp_path / "error.txt", tmp_path / "open"
    body = f"""
    together()

import mimo.launch.start.worker

def wait_for(path):
    while not path.exists():
        time.sleep(0.01)

def mark_open(process):  # called right after rank 0 has opened the run directory to all
    Path({str(is_open)!r}).touch()

def fail(process):
    wait_for(Path({str(is_open)!r}))
    raise ConfigError("run.seed", expected="luck", got="none")

if os.environ["RANK"] == "0":
    mimo.launch.start.worker.prepare = mark_open
if os.environ["RANK"] == "1":
    mimo.launch.start.worker.prepare = fail
if os.environ["RANK"] == "2":
    wait_for(Path({str(reason)!r}))
"""
    assert [code for code, *_ in join(tmp_path, body, 3, shared=True)] == [2, 2, 2]
    assert reason.read_text() == "rank 1: run.seed: expected luck, got none.\n"


def test_the_reason_of_an_earlier_run_is_deleted(tmp_path: Path) -> None:
    """By rank 0, once all have met."""
    (tmp_path / "error.txt").write_text("of the last run")
    assert not [code for code, *_ in join(tmp_path, "    together()\n", 2, shared=True) if code]
    assert not (tmp_path / "error.txt").exists()


def test_the_rank_that_hosts_the_store_waits_for_one_that_ends_later(tmp_path: Path) -> None:
    """Longer than where the run has failed, which is made short here."""
    body = """
    _fault._FINISHED_SECONDS = 0.1
    together()
    time.sleep(1.5 * process.rank)
"""
    assert join(tmp_path, body, 2) == [(0, "", "")] * 2


def test_joined_ranks_that_succeed_end_with_0(tmp_path: Path) -> None:
    """Rank 0, in which the store lives, outlives the others."""
    body = """
    together()
"""
    assert join(tmp_path, body, 2) == [(0, "", "")] * 2
