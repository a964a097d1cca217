"""What is said where a machine, or a limit of it, refuses memory, threads or files."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
from pathlib import Path

import pytest
import torch

from mimo.hooks import ConfigError
from mimo.launch.process.host_memory import HostMemory, Kills
from mimo.launch.runtime import Fault, check_open_files, connect, is_consequence

OUT_OF_MEMORY = "rank 1 is out of host memory: "


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError("std::bad_alloc"), f"{OUT_OF_MEMORY}MemoryError: std::bad_alloc"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), f"{OUT_OF_MEMORY}OSError: [Errno 12] Cannot allocate memory"),
        (RuntimeError("can't start new thread"), "rank 1 can't start another thread or process (see ulimit -u and -"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "rank 1 can't start another thread or pr"),
        (OSError(errno.EMFILE, "Too many open files"), "rank 1 can't open another file or connection (see ulimit -n)"),
        (
            RuntimeError("[enforce fail at gloo/transport/tcp/loop.cc:105] epoll_create: Too many open files"),
            "rank 1 can't open another file or connection (see ulimit -n): RuntimeError: [enforce",
        ),
    ],
)  # fmt: skip
def test_what_a_machine_refuses_is_named_as_such(error: Exception, expected: str) -> None:
    """In the last line, after the traceback; gloo's words for it are no lost connection."""
    fault = Fault.of(error, 1)
    assert fault.text.splitlines()[-1].startswith(expected)
    assert fault.explained
    assert not is_consequence(error)


def test_what_torch_says_of_host_memory_is_known() -> None:
    """Its allocator raises an error of no type of its own."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8)
    assert Fault.of(caught.value, 1).text.splitlines()[-1].startswith(OUT_OF_MEMORY)


LOCKED = "Unable to open file (unable to lock file, errno = 11, error message = 'Resource temporarily unavailable')"


@pytest.mark.parametrize(
    "error",
    [
        BlockingIOError(LOCKED),
        BlockingIOError(errno.EAGAIN, LOCKED),
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable", "a.h5"),
    ],
    ids=["h5py", "numbered", "a file"],
)
def test_a_file_that_is_locked_is_no_want_of_threads(error: Exception) -> None:
    """Though the system has one word for both."""
    assert "rank 1 failed: BlockingIOError: " in Fault.of(error, 1).text


def test_other_errors_keep_their_text() -> None:
    """A GPU's memory is none of the host's."""
    fault = Fault.of(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), 1)
    assert fault.text.endswith("rank 1 failed: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")


GROUP = (
    "It is out of host memory: the kernel killed for want of memory in this control group, "
    "by its limit or the machine's."
)
MACHINE = "The kernel has killed on this machine for want of memory since the run began; this may be one of those."
SHELL = "It is out of host memory: it had 3.5 of the 4.0 GiB of address space that ulimit -v allows."


@pytest.mark.parametrize(
    ("code", "kills", "limit", "size", "expected"),
    [
        (-signal.SIGKILL, Kills(group=3, machine=8), None, 0, GROUP),
        (-signal.SIGKILL, Kills(group=2, machine=8), None, 0, ""),
        (-signal.SIGKILL, Kills(machine=8), None, 0, MACHINE),
        (-signal.SIGKILL, Kills(machine=7), None, 0, ""),
        (-signal.SIGKILL, Kills(group=2, machine=7), 4 << 30, 7 << 29, ""),
        (-signal.SIGABRT, Kills(group=2, machine=7), 4 << 30, 7 << 29, SHELL),
        (1, Kills(group=2, machine=7), 4 << 30, 7 << 29, SHELL),
        (-signal.SIGABRT, Kills(group=3, machine=8), 4 << 30, 1 << 30, ""),
        (-signal.SIGABRT, Kills(group=3, machine=8), None, 7 << 29, ""),
    ],
)
def test_a_process_that_ended_without_a_word_is_explained_as_far_as_can_be_known(
    code: int, kills: Kills, limit: int | None, size: int, expected: str
) -> None:
    """By the kernel's counts for what was killed, by its last size for what ended itself."""
    before = Kills(group=None if kills.group is None else 2, machine=7)
    memory = HostMemory(before=before, limit=limit, sizes={12: size})
    assert memory.explain(12, code, kills) == expected
    text = Fault.of_exit(1, code, expected).text
    assert text.endswith(expected) if expected else "host memory" not in text
    assert ("if nobody did" in text) == (code == -signal.SIGKILL and not expected)


def test_kills_are_read_where_the_kernel_counts_them(tmp_path: Path) -> None:
    """In control groups of both kinds, from outside of a container and inside; and for the machine."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (cgroups / "memory" / "job").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("4:memory:/job\n0::/not/seen/here\n")
    (proc / "vmstat").write_text("pgfault 9\noom_kill 7\n")
    (cgroups / "memory.events").write_text("low 0\noom 5\noom_kill 2\noom_group_kill 1\n")
    (cgroups / "memory" / "job" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    assert Kills.now(proc, cgroups) == Kills(group=6, machine=7)
    assert Kills.now(tmp_path / "none", cgroups) == Kills(group=None, machine=0)


def test_processes_are_looked_at_where_their_size_is_limited() -> None:
    """One that has ended keeps the last size that it had."""
    memory = HostMemory(limit=1 << 40)
    memory.look([os.getpid(), 0])
    assert list(memory.sizes) == [os.getpid()]
    assert memory.sizes[os.getpid()] > 1 << 20
    without = HostMemory(limit=None)
    without.look([os.getpid()])
    assert not without.sizes


def test_too_few_files_are_refused_before_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the number that is needed; else the store would accept some ranks and keep the rest waiting."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (24, 1024))
    with pytest.raises(ConfigError, match=r"^ulimit -n: expected at least \d+ open files, to start 4 proc.*, got 24"):
        check_open_files(4)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    check_open_files(4)


def test_a_store_that_cannot_be_reached_is_given_up_in_time() -> None:
    """In that of the run, and not in the five minutes that torch takes."""
    with pytest.raises(RuntimeError, match=re.escape("timed out after 200ms")):
        connect("127.0.0.1", 1, seconds=0.2)
