"""The lock on a run directory: who holds it, until when, and the error of those that don't get it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but its types don't say so

from mimo.hooks import ConfigError
from mimo.launch import ProcessInfo, check_unlocked, take_lock
from mimo.launch.process import run_lock as _run_lock
from mimo.launch.runtime import Fault, FaultStore, Terms
from mimo.launch.start import worker as _worker
from mimo.testing import script

INFINITE = b'{"host": "a", "pid": Infinity, "since": "b"}'
HELD = r"^run\.directory: expected a folder into which no other run writes, got "


def is_free(directory: Path, *, seconds: float = 0) -> bool:
    """Return whether a run could take the directory now, or soon: a program closes files while it begins."""
    try:
        take_lock(directory, seconds=seconds).release()
    except ConfigError as error:
        return "which is held by" not in str(error)
    return True


@attrs.define
class Clock:
    """Time that passes when somebody sleeps, and what happens then."""

    now: float = 0.0
    then: Callable[[float], object] = lambda _now: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.then(self.now)


def test_a_second_run_is_refused_and_the_first_is_named(tmp_path: Path) -> None:
    """By host, process and since when; the directory is made for the first."""
    directory = tmp_path / "runs" / "a"
    first = take_lock(directory, seconds=0)
    with pytest.raises(ConfigError, match=HELD) as caught:
        take_lock(directory, seconds=0)
    holder = f"process {os.getpid()} on {re.escape(socket.gethostname())} since "
    assert re.search(holder + r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC\. Wait for that run to end", str(caught.value))
    with pytest.raises(ConfigError, match=HELD):
        check_unlocked(directory)
    first.release()
    check_unlocked(directory)
    assert is_free(directory)


def test_looking_for_a_lock_makes_nothing(tmp_path: Path) -> None:
    """Neither a folder nor a file, and it leaves what is there as it is."""
    check_unlocked(tmp_path / "none")
    check_unlocked(tmp_path)
    assert list(tmp_path.iterdir()) == []
    take_lock(tmp_path, seconds=0).release()
    before = (tmp_path / "run.lock").read_bytes()
    check_unlocked(tmp_path)
    assert (tmp_path / "run.lock").read_bytes() == before


def test_a_restart_waits_for_its_predecessor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says for whom, once it takes long."""
    first = take_lock(tmp_path, seconds=0)
    clock = Clock(then=lambda now: first.release() if now > 30 else None)
    monkeypatch.setattr(_run_lock, "time", clock)
    take_lock(tmp_path, seconds=60).release()
    assert 30 < clock.now < 31
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert text.startswith(f"mimo: run.directory: waits up to 60 s for process {os.getpid()} on ")


def test_a_restart_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that lives on is named like any other."""
    clock = Clock()
    monkeypatch.setattr(_run_lock, "time", clock)
    with take_lock(tmp_path, seconds=0), pytest.raises(ConfigError, match=HELD):
        take_lock(tmp_path, seconds=60)
    assert 60 < clock.now < 61


def test_the_kernel_releases_the_lock_of_whoever_is_killed(tmp_path: Path) -> None:
    """The launcher may be gone before: a forked rank 0 holds it on; when that is killed, nobody does."""
    lock = take_lock(tmp_path, seconds=0)
    child = os.fork()
    if not child:
        signal.pause()
    try:
        lock.close()
        assert not is_free(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert is_free(tmp_path)


def test_processes_that_rank_0_starts_hold_nothing(tmp_path: Path) -> None:
    """Forked ones and programs, whatever they inherit; they may outlive the run."""
    lock = take_lock(tmp_path, seconds=0)
    lock.keep()
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.write(writes, b"begun")
        signal.pause()
    os.read(reads, 5)
    program = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=-1, close_fds=False)
    try:
        lock.close()
        assert is_free(tmp_path, seconds=20)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        program.communicate()


def test_a_spawned_rank_0_holds_it_too(tmp_path: Path) -> None:
    """As GPUs want fresh interpreters, to which the lock is passed on."""
    (tmp_path / "program.py").write_text("import signal\nsignal.pause()\n")
    lock = take_lock(tmp_path, seconds=0)
    child = multiprocessing.get_context("spawn").Process(target=script, args=(str(tmp_path / "program.py"), lock))
    child.start()
    try:
        lock.close()
        assert not is_free(tmp_path)
    finally:
        child.kill()
        child.join()
    assert is_free(tmp_path)


def test_a_directory_that_was_removed_meanwhile_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock on a file that is gone would keep nobody out."""
    directory, flock = tmp_path / "run", fcntl.flock
    removed: list[bool] = []

    def remove_once(descriptor: int, how: int) -> None:
        if not removed:
            removed.append(True)
            (directory / "run.lock").unlink()
            directory.rmdir()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", remove_once)
    with take_lock(directory, seconds=1):
        assert not is_free(directory)


def test_a_file_system_without_locks_is_reported_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing can keep another run out there."""

    def refuse(_descriptor: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with take_lock(tmp_path, seconds=0):
        check_unlocked(tmp_path)
    assert capsys.readouterr().err == (
        "mimo: run.directory: expected a file system with locks (flock), got No locks available for "
        f"'{tmp_path}/run.lock'. The run goes on; nothing keeps another one out of its directory.\n"
    )


@pytest.mark.parametrize("text", [b"", b"\0" * 50, b"[]", b'{"host": "a"}', b"[" * 4096, INFINITE], ids=range(6))
def test_a_lock_that_names_nobody_is_still_refused(text: bytes, tmp_path: Path) -> None:
    """Its file says nothing of whether it is held."""
    with take_lock(tmp_path, seconds=0):
        (tmp_path / "run.lock").write_bytes(text)
        with pytest.raises(ConfigError, match="held by a process that its lock doesn't name"):
            take_lock(tmp_path, seconds=0)


def test_names_of_holders_reach_no_terminal_raw(tmp_path: Path) -> None:
    """Whoever may write into the directory writes the file too."""
    with take_lock(tmp_path, seconds=0):
        (tmp_path / "run.lock").write_text('{"host": "\\u001b[2J", "pid": 1, "since": "\\u0007"}')
        with pytest.raises(ConfigError, match=r"process 1 on \?\[2J since \?"):
            take_lock(tmp_path, seconds=0)


def test_a_directory_that_cannot_be_made_or_written_is_refused(tmp_path: Path) -> None:
    """With the system's reason."""
    (tmp_path / "locks" / "run.lock").mkdir(parents=True)
    for directory, why in (("/proc/x", "No such file or directory"), (tmp_path / "locks", "Is a directory")):
        with pytest.raises(
            ConfigError, match=r"^run\.directory: expected a folder that can be made and written, got "
        ) as caught:
            take_lock(Path(directory), seconds=0)
        assert f"{str(directory)!r}: {why}." in str(caught.value)


def test_a_disk_without_room_for_the_lock_is_refused_and_later_taken(small_disk: Path) -> None:
    """Before anything is launched, which could not write either; nothing is left locked."""
    filler = small_disk / "filler"
    (small_disk / "run").mkdir()
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 12)):
            pass
    with pytest.raises(ConfigError, match=r"made and written, got .*: No space left on device"):
        take_lock(small_disk / "run", seconds=0)
    filler.unlink()
    assert is_free(small_disk / "run")


def test_no_rank_writes_why_it_failed_before_rank_0_holds_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it may be another run's."""

    def end(code: int) -> None:
        raise SystemExit(code)

    def write(fault: Fault) -> None:
        (tmp_path / "error.txt").write_text(fault.text)

    monkeypatch.setattr(_worker, "end", end)
    fault_store, fault = FaultStore(HashStore()), Fault(rank=1, code=3, text="why", explained=True)
    for is_held in (False, True):
        if is_held:
            fault_store.open_directory()
        worker = _worker._Worker(
            ProcessInfo(rank=1, world=2, local_rank=1),
            fault_store,
            Terms(on_failure=write),
            shows=False,
            hosts=False,
        )
        with pytest.raises(SystemExit, match="3"):
            worker.report(fault)
        assert [path.read_text() for path in tmp_path.iterdir()] == ["why"] * is_held
