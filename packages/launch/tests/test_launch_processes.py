"""Ranks that a launcher starts: how they meet, and how the first that fails ends them all."""

from __future__ import annotations

import re
import signal
import socket
from multiprocessing import Pipe
from pathlib import Path

import pytest
from launching import BLOCKED, HEAD, finish, launched, start

from mimo.launch import ProcessInfo
from mimo.launch.runtime import Rendezvous, Terms, start_method
from mimo.launch.start.launcher import _processes
from mimo.testing import processes, script


def test_all_ranks_meet_and_the_exit_code_is_0(tmp_path: Path) -> None:
    """Every rank gets its `ProcessInfo` and a process group."""
    body = """
    assert (process.rank, process.world, process.device) == (dist.get_rank(), 3, "cpu")
    if together() == 3 and process.rank == 2:
        print("met")
"""
    assert launched(tmp_path, body, fresh=True) == (0, "met\n", "")
    assert not (tmp_path / "error.txt").exists()


def test_one_ranks_data_error_ends_all_with_3_and_is_shown_once_without_traceback(tmp_path: Path) -> None:
    """The others wait in a collective for a rank that never comes, and end nevertheless."""
    body = """
    together()
    if process.rank == 1:
        raise DataError("train.jsonl:12", expected="an image that can be read", got="'a.png'")
    together()
"""
    code, out, err = launched(tmp_path, body)
    expected = "rank 1: train.jsonl:12: expected an image that can be read, got 'a.png'.\n"
    assert (code, out, err) == (3, "", f"mimo: {expected}")
    assert (tmp_path / "error.txt").read_text() == expected


def test_a_rank_whose_output_nobody_reads_ends_all_without_a_word(tmp_path: Path) -> None:
    """As other tools end after `| head`, while the others wait in a collective."""
    body = """
    together()
    if process.rank == 0:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.raise_signal(signal.SIGPIPE)
    together()
"""
    assert launched(tmp_path, body) == (141, "", "")
    assert not (tmp_path / "error.txt").exists()


def test_an_unexpected_error_shows_its_traceback_once_and_names_the_rank_last(tmp_path: Path) -> None:
    """A bug is shown with where it happened."""
    body = """
    together()
    if process.rank == 2:
        raise KeyError("lost")
    together()
"""
    code, _, err = launched(tmp_path, body)
    assert code == 3
    assert err.count("Traceback (most recent call last)") == 1
    assert err.endswith("rank 2 failed: KeyError: 'lost'\n")


def test_an_error_before_the_ranks_met_ends_the_others_too(tmp_path: Path) -> None:
    """A rank that other ranks wait for in start-up is reported like any other, with its own exit code."""
    body = """
    if process.rank == 0:
        raise ConfigError("run.seed", expected="luck", got="none")
    together()
"""
    code, _, err = launched(tmp_path, body)
    ours = [line for line in err.splitlines() if line.startswith("mimo:")]  # Gloo may write that a peer went away
    assert (code, ours) == (2, ["mimo: rank 0: run.seed: expected luck, got none."])
    assert "Traceback" not in err


def test_a_killed_rank_is_named_with_its_signal(tmp_path: Path) -> None:
    """What the other ranks suffer from it is not reported as the cause."""
    body = """
    together()
    if process.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    together()
"""
    code, _, err = launched(tmp_path, body)
    assert code == 3
    assert err.startswith("mimo: rank 1 was ended by signal 9 (SIGKILL).")
    assert err.count("\n") == 1
    assert "rank 1 was ended by signal 9" in (tmp_path / "error.txt").read_text()


def test_a_rank_that_exits_without_a_reason_is_named(tmp_path: Path) -> None:
    """A library that ends the process does not go unnoticed."""
    body = """
    together()
    if process.rank == 1:
        os._exit(7)
    signal.pause()
"""
    code, _, err = launched(tmp_path, body)
    assert (code, err) == (3, "mimo: rank 1 ended with exit code 7 and without a reason.\n")


@pytest.mark.parametrize("blocks", [False, True], ids=["refuses", "doesn't answer"])
def test_a_reason_that_cannot_be_written_is_still_shown(blocks: bool, tmp_path: Path) -> None:
    """Whether a run directory is full, or never answers: here the file is a folder, or a pipe that nobody reads."""
    make = "os.mkfifo" if blocks else "os.mkdir"
    body = f"""
    together()
    if process.rank == 1:
        {make}({str(tmp_path / "error.txt")!r})
        raise DataError("train.jsonl:12", expected="an image", got="none")
    together()
"""
    code, _, err = launched(tmp_path, body)
    assert (code, err) == (3, "mimo: rank 1: train.jsonl:12: expected an image, got none.\n")


def test_fresh_interpreters_meet_and_end_as_forked_processes_do(tmp_path: Path) -> None:
    """Spawned, each rank reads its task and `ProcessInfo` from plain bytes; the first error ends all."""
    body = """
    assert __name__ == "__mp_main__" and process.local_rank == process.rank
    assert together() == 2
    if process.rank == 1:
        raise DataError("train.jsonl:7", expected="text", got="none")
    together()
"""
    code, out, err = launched(tmp_path, body, world=2, method="spawn")
    expected = "rank 1: train.jsonl:7: expected text, got none.\n"
    assert (code, out, err) == (3, "", f"mimo: {expected}")
    assert (tmp_path / "error.txt").read_text() == expected


def test_each_process_has_a_gpu_of_its_own() -> None:
    """The number of the process on this machine is that of its GPU; fresh interpreters inherit no socket."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reads, writes = Pipe(duplex=False)
        processes = _processes(print, 2, "cuda", start_method("cuda"), Terms(), reads, (listener, writes))
    arguments = [vars(process)["_args"] for process in processes]
    assert [process for _, process, *_ in arguments] == [
        ProcessInfo(rank=rank, world=2, local_rank=rank, device=f"cuda:{rank}") for rank in (0, 1)
    ]
    assert [inherited for *_, inherited in arguments] == [(), ()]


def test_a_program_may_hand_over_how_its_processes_meet(tmp_path: Path) -> None:
    """Where each computes and by what backend they send; the rank chooses the backend before it has a group."""
    program = tmp_path / "meets.py"
    program.write_text(
        HEAD
        + """
    say(process.device, dist.get_backend(), together())

def backend(device):
    assert not dist.is_initialized() and device == "cpu"
    dist.Backend.register_backend("ours", dist.ProcessGroupGloo, devices=["cpu"])
    return "ours"

def device(name, local_rank):
    return name

if __name__ == "__main__":
    from mimo.launch.runtime import Rendezvous
    sys.exit(launch(entry, world=2, rendezvous=Rendezvous(device=device, backend=backend)))
"""
    )
    with processes.start(str(program), call=script) as started:
        code, out, err = finish(started)
    assert (code, sorted(out.splitlines()), err) == (0, ["cpu ours 2", "cpu ours 2"], "")


def test_where_ranks_meet_as_usual() -> None:
    """A GPU for each, with NCCL for what lies there; gloo alone on the CPU."""
    usual = Rendezvous()
    assert [usual.device(name, 3) for name in ("cpu", "cuda")] == ["cpu", "cuda:3"]
    assert [usual.backend(device) for device in ("cpu", "cuda:3")] == ["gloo", "nccl"]


def test_a_rank_that_hangs_when_others_have_ended_is_named(tmp_path: Path) -> None:
    """They don't answer any more, and are not taken for dead."""
    body = """
    process.heartbeat.enter("the test")
    together()
    if process.rank == 1:
        time.sleep(1000)
"""
    code, _, err = launched(tmp_path, body, timeout=3)
    assert code == 3
    found = re.fullmatch(r"mimo: rank 1 did not go on for .* s in the test, at (.*), line .*", err.strip())
    assert found is not None, err
    assert found[1] == "__main__"


def test_a_killed_launcher_leaves_no_rank_behind_and_one_line(tmp_path: Path) -> None:
    """What is lost with it is reported once, without frames; `finish` returns only when all ranks are gone."""
    body = BLOCKED.replace("together()", 'process.heartbeat.enter("the test")\n    together()', 1)
    with start(tmp_path, body) as started:
        started.wait_for("ready")
        started.process.kill()
        expected = "The process that started all ranks is gone. Rank 0 was in the test.\n"
        assert finish(started) == (-signal.SIGKILL, "ready\n", f"mimo: {expected}")
    assert (tmp_path / "error.txt").read_text() == expected
