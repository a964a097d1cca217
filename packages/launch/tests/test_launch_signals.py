"""What signals do to a launcher and its ranks, each time in real processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from launching import BLOCKED, finish, join, launched, start


def test_ctrl_c_while_fresh_interpreters_import_is_silent(tmp_path: Path) -> None:
    """They take seconds to begin, in which a signal must leave neither processes nor their tracebacks."""
    with start(tmp_path, BLOCKED, world=2, method="spawn") as started:
        while len(started.workers()) < 3:  # and the tracker of their resources
            pass
        os.killpg(started.pid, signal.SIGINT)
        code, _, err = finish(started)
        assert (code, err) == (130, "mimo: interrupted\n")


def test_ctrl_c_ends_every_process_with_130_and_no_traceback(tmp_path: Path) -> None:
    """Ctrl-C reaches the whole process group, ranks in a collective included."""
    with start(tmp_path, BLOCKED) as started:
        started.wait_for("ready")
        os.killpg(started.pid, signal.SIGINT)
        code, _, err = finish(started)
        assert (code, err) == (130, "mimo: interrupted\n")


def test_sigterm_to_the_launcher_alone_ends_every_process_with_143(tmp_path: Path) -> None:
    """What batch systems send to the process that they know."""
    with start(tmp_path, BLOCKED) as started:
        started.wait_for("ready")
        started.process.terminate()
        code, _, err = finish(started)
        assert (code, err) == (143, "mimo: interrupted\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_task_that_handles_sigterm_ends_by_itself(number: int, tmp_path: Path) -> None:
    """Also where the main thread is in a collective; sent to the group it comes twice, which is one request."""
    body = """
    together()
    if process.rank:
        together()
    else:
        print("ready", flush=True)
        while not process.heartbeat.stops:
            time.sleep(0.01)
        together()
    until = time.monotonic() + 60
    while not process.heartbeat.stops and time.monotonic() < until:
        time.sleep(0.01)
    assert process.heartbeat.stops
"""
    with start(tmp_path, body, stops=True) as started:
        started.wait_for("ready")
        os.killpg(started.pid, number)
        expected = "mimo: asked to stop: the step is finished and saved. A second signal ends all at once.\n"
        assert finish(started) == (0, "ready\n", expected)


def test_a_second_sighup_is_the_same_request(tmp_path: Path) -> None:
    """A terminal that goes may send several, to the launcher and to all ranks."""
    go = tmp_path / "go"
    body = f"""
    together()
    if process.rank == 0:
        say("ready")
    while not process.heartbeat.stops:
        time.sleep(0.01)
    while not Path({str(go)!r}).exists():
        time.sleep(0.01)
    together()
"""
    with start(tmp_path, body, stops=True, world=2) as started:
        started.wait_for("ready")
        os.killpg(started.pid, signal.SIGHUP)
        time.sleep(1.5)  # sooner it would be the same request
        os.killpg(started.pid, signal.SIGHUP)
        go.touch()
        expected = "mimo: asked to stop: the step is finished and saved. A second signal ends all at once.\n"
        assert finish(started) == (0, "ready\n", expected)


def test_a_terminal_that_goes_does_not_end_what_nohup_started(tmp_path: Path) -> None:
    """Neither at once nor after the step: the signal was ignored when the command began."""
    body = """
    together()
    if process.rank == 0:
        os.killpg(os.getpgrp(), signal.SIGHUP)
    until = time.monotonic() + 1
    while not process.heartbeat.stops and time.monotonic() < until:
        time.sleep(0.01)
    say(process.heartbeat.stops, together())

if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
"""
    assert launched(tmp_path, body, stops=True, world=2) == (0, "False 2\n" * 2, "")


def test_a_run_whose_terminal_is_closed_ends_by_itself(tmp_path: Path) -> None:
    """Though nothing that it prints can be written any more."""
    master, slave = os.openpty()
    written = tmp_path / "written"
    body = f"""
    def write(text):
        try:
            say(text)
        except OSError:  # the terminal is closed
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    together()
    while not process.heartbeat.stops:
        if process.rank == 0:
            write("a step")
        time.sleep(0.01)
    if process.rank == 0:
        write("saved")
        Path({str(written)!r}).write_text(str(together()))
    else:
        together()

if __name__ == "__main__":
    terminal = os.open({os.ttyname(slave)!r}, os.O_RDWR)  # that of this session from now on
    for number in (0, 1, 2):
        os.dup2(terminal, number)
"""
    with os.fdopen(master, "rb", buffering=0) as screen, start(tmp_path, body, stops=True, world=2) as started:
        shown = b""
        while b"a step" not in shown:
            shown += screen.read(1 << 10)
        os.close(slave)
        screen.close()
        assert finish(started)[0] == 0
    assert written.read_text() == "2"


@pytest.mark.parametrize("again", [False, True])
def test_one_that_takes_too_long_is_ended(again: bool, tmp_path: Path) -> None:
    """When it has taken as long as a run may stand still, or gets the signal again."""
    with start(tmp_path, BLOCKED, stops=True, timeout=600 if again else 1) as started:
        started.wait_for("ready")
        started.process.terminate()
        if again:
            time.sleep(1.5)  # sooner it would be the same request
            started.process.terminate()
        code, _, err = finish(started)
        assert (code, err.splitlines()[-1]) == (143, "mimo: interrupted")


def test_sigterm_to_a_rank_that_is_done_is_nothing(tmp_path: Path) -> None:
    """Python forgets handlers of ours before the process is gone, but not that a signal is ignored."""
    body = """
    import atexit
    atexit.register(lambda: print(signal.getsignal(signal.SIGTERM) is signal.SIG_IGN))
"""
    assert join(tmp_path, body, 1, stops=True, fresh=True) == [(0, "True\n", "")]
